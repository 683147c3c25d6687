"""A few pieces of work at once, with progress: the threads count bytes, the caller's thread reports them."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from pptasks.errors import DownloadError

AT_ONCE = 4
REPORT_S = 0.1


class Meter:
    """Bytes done, counted by several threads, and the word to stop."""

    def __init__(self) -> None:
        self.done = 0
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def add(self, n: int) -> None:
        """Count; DownloadError if the work was stopped."""
        with self._lock:
            self.done += n
        if self.stopped.is_set():
            raise DownloadError("stopped")


Job = Callable[[Meter], None]


def at_once(jobs: Iterable[Job], report: Callable[[int], None], stop: Callable[[], None] = lambda: None) -> None:
    """Run the jobs, and report the bytes done meanwhile, from this thread.

    The first error ends the others and is raised; so does an exception from `report`, an interrupt among them. `stop`
    is called then: it wakes jobs that wait for something.
    """
    meter = Meter()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch") as pool:
        left = {pool.submit(job, meter) for job in jobs}
        try:
            while left:
                done, left = wait(left, REPORT_S, FIRST_EXCEPTION)
                report(meter.done)
                for future in done:
                    future.result()
        except BaseException:
            meter.stopped.set()
            stop()
            pool.shutdown(cancel_futures=True)
            raise
