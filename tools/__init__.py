"""What turns a pinned SGLang release, the patch series and the overlay into one wheel.

Importing it comes before any tool's own imports, so that Ctrl-C is one line during those too.
"""

import sys
from types import TracebackType

from tools.errors import INTERRUPTED


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what ends a tool; an interruption is no defect and needs no traceback."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print(f"error: {INTERRUPTED}", file=sys.stderr)
    sys.exit(130)


sys.excepthook = _report
