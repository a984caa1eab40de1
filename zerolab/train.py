"""`python -m zerolab.train`, for torchrun and srun: runs the training script in apps/train.py."""

import sys

from zerolab.apps.train import main

if __name__ == "__main__":
    sys.exit(main())
