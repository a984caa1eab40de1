"""`python -m zerolab.train`, as torchrun and srun start it: the training script of apps/train.py."""

import sys

from zerolab.apps.train import main

if __name__ == "__main__":
    sys.exit(main())
