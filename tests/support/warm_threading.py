"""A job whose module starts a thread while it is imported, which a fork would not copy."""

import threading

from tests.support import warmed

THREAD = threading.Thread(target=threading.Event().wait, daemon=True)
THREAD.start()


class Told(warmed.Told):
    """Tells whether the thread is there."""

    def facts(self) -> dict[str, object]:
        return {**super().facts(), "thread": THREAD.is_alive()}
