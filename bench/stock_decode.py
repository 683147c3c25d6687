"""Stock tinygrad's own single-process decode of a GGUF, for comparison. Runs in an environment with tinygrad 0.13.0
(bench/decode.py makes it).

python stock_decode.py MODEL.gguf TOKENS "1,2,3"      prints one JSON object: tokens_per_s, first_s, token_ids
"""

import json
import pathlib
import sys
import time

from tinygrad.llm.model import Transformer

path, n, prompt = pathlib.Path(sys.argv[1]), int(sys.argv[2]), [int(t) for t in sys.argv[3].split(",")]
model, _ = Transformer.from_gguf(path, 2048)
began = time.perf_counter()
generated, stamps = [], []
for token in model.generate(list(prompt)):
    generated.append(int(token))
    stamps.append(time.perf_counter())
    if len(generated) == n:
        break
steady = stamps[5:]  # the first few compile
print(
    json.dumps(
        {
            "tokens_per_s": (len(steady) - 1) / (steady[-1] - steady[0]),
            "first_s": stamps[0] - began,
            "token_ids": generated,
        }
    )
)
