"""make_app(settings): the one Celery configuration of a run, for workers, clients, `inspect` and Flower alike.

docs/decisions.md has the measurements behind the settings that are not Celery's defaults.
"""

from celery import Celery
from kombu import Exchange, Queue

from pptasks.config import Settings
from pptasks.keys import Keys, stage_queue
from pptasks.tasks import GENERATE, register

RESULT_KEEP_S = 24 * 3600


def make_app(settings: Settings) -> Celery:
    """A Celery app that speaks to the run `settings.run` on `settings.broker`. Opens no connection."""
    keys = Keys(settings.run)
    app = Celery("pptasks", set_as_current=False)
    app.conf.update(
        broker_url=settings.broker,
        broker_transport="pptasks.transport:Transport",
        broker_transport_options={"global_keyprefix": keys.prefix},
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        result_backend=settings.broker,
        result_backend_transport_options={"global_keyprefix": keys.prefix},
        result_expires=RESULT_KEEP_S,
        redis_socket_timeout=5.0,
        redis_backend_health_check_interval=3,
        task_serializer="json",
        accept_content=["json"],
        task_queues=[_queue(stage_queue(i)) for i in _consumed(settings)],
        task_default_queue=stage_queue(0),
        task_routes={GENERATE: {"queue": stage_queue(0)}},
        task_ignore_result=False,
        task_track_started=True,
        worker_prefetch_multiplier=16,
        worker_send_task_events=True,
        worker_enable_soft_shutdown_on_idle=False,
        worker_hijack_root_logger=True,
        worker_disable_rate_limits=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )
    register(app)
    app.settings = settings
    return app


def _consumed(settings: Settings) -> range:
    """The stages whose queues a process may read from: a worker's own, all of them for a client."""
    return range(settings.num_stages) if settings.stage is None else range(settings.stage, settings.stage + 1)


def _queue(name: str) -> Queue:
    """A queue on an exchange of its own: on a shared one, each stage would get every request."""
    return Queue(name, Exchange(name, type="direct"), routing_key=name)
