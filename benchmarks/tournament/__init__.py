"""Parts of the benchmark of trainers that compete: contests within one process, their rivals, and a rank of a job."""
