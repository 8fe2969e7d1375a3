"""What the package can be used for beyond its commands. No installed package holds these."""
