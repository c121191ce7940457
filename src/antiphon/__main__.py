"""`python -m antiphon` is the `antiphon` command."""

import sys

from antiphon.cli.main import main

sys.exit(main())
