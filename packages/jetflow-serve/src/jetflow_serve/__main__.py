"""`python -m jetflow_serve` is `jetflow-serve`."""

import sys

from jetflow_serve.cli import main

sys.exit(main())
