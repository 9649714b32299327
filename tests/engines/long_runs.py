"""Whether tests run as long as what is claimed, as by `make test-long`, or only as much of that as takes a minute."""

import os

FULL = bool(os.environ.get("TERCET_LONG_TESTS"))
