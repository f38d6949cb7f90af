"""A task waits for another pool's that has not begun, and both pools are stopped."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

from tensorize_assets.worker.serializer import stop

if __name__ == "__main__":
    first, second = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    begun, go = threading.Event(), threading.Event()
    second.submit(go.wait)
    behind = second.submit(print, "never begun")

    def waits() -> None:
        begun.set()
        wait([behind])

    waiting = first.submit(waits)
    begun.wait()
    threading.Timer(0.5, go.set).start()
    stop((first, second))
    assert behind.cancelled()
    assert waiting.exception() is None
