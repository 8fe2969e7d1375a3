"""Entry point for `python -m ensemble_ml`, the same as `ensemble-ml`; launchers such as torchrun need a module."""

import sys

from ensemble_ml.cli import main

sys.exit(main())
