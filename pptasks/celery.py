"""`celery -A pptasks ...`: inspect, control and Flower for the run that the environment names (PP_BROKER, PP_RUN)."""

from pptasks.app import make_app
from pptasks.config import Settings

app = make_app(Settings.from_env())
