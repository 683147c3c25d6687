"""A request from any Celery producer; nothing of pptasks is needed.

PP_BROKER=redis://:password@host:6379/0 PP_RUN=demo python examples/submit_from_celery.py "Say hello"
"""

import os
import sys

from celery import Celery

url, prefix = os.environ["PP_BROKER"], {"global_keyprefix": f"pp:{os.environ['PP_RUN']}:"}
app = Celery(broker=url, backend=url)
app.conf.update(broker_transport_options=prefix, result_backend_transport_options=prefix)

kwargs = {"messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 64}
result = app.send_task("pptasks.generate", kwargs=kwargs, queue="stage0")
answer = result.get(timeout=300)  # result.revoke() stops it
print(repr(answer["text"]))  # a model's text must not command a terminal
print(answer["finish_reason"], answer["prompt_tokens"], answer["cached_tokens"], answer["completion_tokens"])
