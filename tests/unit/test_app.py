"""The Celery app of a run: what it is told, and what it leaves alone."""

from celery import Celery

from pptasks.app import make_app
from pptasks.config import Settings
from pptasks.tasks import GENERATE
from pptasks.transport import HOP_TASK


def test_its_tasks_are_in_no_other_app_of_the_process() -> None:
    ours = make_app(Settings())
    with Celery("somebody", set_as_current=False) as theirs:
        theirs.finalize()
        assert {GENERATE, HOP_TASK} <= set(ours.tasks)
        assert not {GENERATE, HOP_TASK} & set(theirs.tasks)


def test_a_worker_reads_from_its_own_queue_and_a_client_may_send_to_all() -> None:
    assert list(make_app(Settings(stage=1, num_stages=3)).amqp.queues) == ["stage1"]
    assert list(make_app(Settings(num_stages=3)).amqp.queues) == ["stage0", "stage1", "stage2"]
