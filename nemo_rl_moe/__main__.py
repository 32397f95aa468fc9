"""`python -m nemo_rl_moe`."""

import sys

from nemo_rl_moe.cli import main

sys.exit(main())
