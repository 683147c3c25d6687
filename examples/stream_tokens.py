"""Several requests at once, their text as it comes: all answers go to one Redis stream, which one reader follows.

PP_BROKER=redis://:password@host:6379/0 PP_RUN=demo python examples/stream_tokens.py "Say hello" "Count to three"

Prints a line for each piece: the number of its question, and its text.
"""

import json
import os
import secrets
import sys

import redis
from celery import Celery

url, prefix = os.environ["PP_BROKER"], f"pp:{os.environ['PP_RUN']}:"
app = Celery(broker=url)
app.conf.broker_transport_options = {"global_keyprefix": prefix}

reply = secrets.token_hex(8)  # the stream's name: this process's own
questions = {}
for number, prompt in enumerate(sys.argv[1:]):
    kwargs = {"prompt": prompt, "max_tokens": 64, "reply": reply}
    questions[app.send_task("pptasks.generate", kwargs=kwargs, queue="stage0").id] = number

client, last, failed, silent_s = redis.Redis.from_url(url, protocol=2), "0", False, 0  # RESP2: lists
while questions and silent_s < 300:  # a head that was killed says nothing more
    found = client.xread({f"{prefix}stream:{reply}": last}, block=1000)
    silent_s = 0 if found else silent_s + 1
    for entry_id, fields in (entry for _, entries in found for entry in entries):
        last = entry_id
        for piece in json.loads(fields[b"e"])["pieces"]:
            if text := piece.get("text"):
                print(questions[piece["request"]], repr(text), flush=True)  # it must not command a terminal
            if end := piece.get("end"):  # "ok", "failed" or "cancelled"
                print(questions.pop(piece["request"]), end, repr(piece.get("error", "")))
                failed |= end != "ok"
client.close()
sys.exit(failed or bool(questions))
