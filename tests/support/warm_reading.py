"""A job whose module looks at its rank while it is imported, as many scripts do."""

import os

from tests.support import warmed

RANK_AT_IMPORT = int(os.environ.get("RANK", "0"))


class Told(warmed.Told):
    """Tells the rank that the import saw."""

    def facts(self) -> dict[str, object]:
        return {**super().facts(), "rank at import": RANK_AT_IMPORT}
