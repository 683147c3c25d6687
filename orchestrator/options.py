"""The command line's options, by what they are about; each command takes the groups that it needs."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import click

from orchestrator.run import EMBEDDED
from pptasks.config import MAX_CHUNK, MAX_CONTEXT, MAX_IN_FLIGHT, MAX_SLOTS, MAX_STAGES
from pptasks.request import MAX_PENALTY, MAX_TEMPERATURE, MAX_TOKENS, MAX_TOP_K, MIN_TOP_P
from pptasks.wire import MAX_LOGPROBS

IMAGE = "docker.io/pptasks/gpu-node:0.1.0"
MAX_DEADLINE_S = 30 * 86400
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.FloatRange):
    """A range that "nan" is not in."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Duration(click.ParamType):
    """Seconds, from "90", "90s", "5m", "2h" or "1d"."""

    name = "duration"
    _FORM = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)", re.ASCII)
    _UNITS: ClassVar = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = self._FORM.fullmatch(value)
        seconds = float(match[1]) * self._UNITS[match[2]] if match else 0.0
        if not 0 < seconds <= MAX_DEADLINE_S:
            self.fail(f"{value!r} is no time from 1s to 30d, such as 90s, 5m or 2h.", param, ctx)
        return seconds


def group(*options: Decorator) -> Decorator:
    """One decorator for several, listed in `--help` in the order given."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def option(name: str, help: str, **settings: Any) -> Decorator:
    """A click option that shows its default, unless the help text tells it."""
    return click.option(name, help=help, show_default="default" in settings and "[default" not in help, **settings)


model = group(
    option(
        "--model",
        "A known name (pp models), owner/name[@revision] or hf:owner/name/file.gguf on the Hugging Face Hub, "
        "https://.../x.gguf, a .gguf file, or a Hugging Face folder.  "
        "[default: smollm2:135m; llama3.2:1b with --vastai]",
    ),
    option(
        "--stages",
        "Pipeline stages, one worker each.  [default: 2, or as many as --split names]",
        type=click.IntRange(1, MAX_STAGES),
    ),
    option(
        "--split",
        "Blocks of each stage; auto balances parameters, or bytes against --memory.",
        default="even",
        metavar="even|auto|a,b,...",
    ),
    option(
        "--wire",
        "Dtype of the hidden state between stages; f32 makes a split bit-equal to the whole.",
        type=click.Choice(["bf16", "f32", "f16"]),
        default="bf16",
    ),
    option(
        "--readout",
        "Where tokens are sampled: on the head (a ring) or on the last stage (a line). "
        "auto: on the head when its embedding is the output head too.",
        type=click.Choice(["auto", "first", "last"]),
        default="auto",
    ),
    option(
        "--context",
        "Positions that a sequence may take.  [default: 2048, or the model's if less]",
        type=click.IntRange(1, MAX_CONTEXT),
    ),
    option(
        "--memory",
        "What each stage may hold (weights and KV cache), checked before anything starts; one size counts for all.",
        metavar="8G,24G,...",
    ),
    option(
        "--weights",
        "How quantised weights are held: as F16 (or BF16), or as in their file: less memory, slower on a CPU.",
        type=click.Choice(["16bit", "quantized"]),
        default="16bit",
    ),
    option(
        "--slots",
        "Sequences that the KV cache holds at once.  [default: 16, or as many as fit]",
        type=click.IntRange(1, MAX_SLOTS),
    ),
    option("--kv-bytes", "Most memory of a stage for its KV cache.  [default: what is free]", metavar="SIZE"),
    option("--lanes", "Most sequences that one lap carries.", type=click.IntRange(1, MAX_SLOTS), default=32),
    option(
        "--in-flight",
        "Laps under way at once; more of them hide a slow network.  [default: as many as stages]",
        type=click.IntRange(1, MAX_IN_FLIGHT),
    ),
    option(
        "--prefill-chunk",
        "Most rows of a frame: tokens of prompts, or sequences that decode.",
        type=click.IntRange(1, MAX_CHUNK),
        default=128,
    ),
)

cluster = group(
    option(
        "--link",
        "How workers reach the broker.",
        type=click.Choice(["direct", "iroh"]),
        default="direct",
    ),
    option(
        "--relay",
        "iroh's relays for a link; none stays on this machine's own addresses.  [default: none; default with --vastai "
        "or --hosts]",
        metavar="none|default|URL,...",
    ),
    option(
        "--broker",
        "A private Redis for this run, or your own. Give a URL with a password as PP_BROKER: others see arguments."
        "  [default: embedded]",
        default=EMBEDDED,
        metavar="embedded|redis://...",
        envvar="PP_BROKER",
    ),
    option("--broker-port", "Port of the embedded broker.  [default: a free one]", type=click.IntRange(1, 65535)),
    option(
        "--kernels",
        "auto: C kernels on a CPU; tinygrad: its own everywhere.",
        type=click.Choice(["auto", "tinygrad"]),
        default="auto",
    ),
    option(
        "--audit-rate",
        "Share of steps in which each stage computes a row of a product again, in numpy; 0: never.",
        type=Number(0, 1),
        default=0.01,
    ),
    option(
        "--timeout",
        "The longest wait, in seconds, for a stage to get on with its start, and for a token.",
        type=Number(min=0, min_open=True),
        default=120.0,
    ),
    click.option("--quiet", "-q", is_flag=True, help="No progress and no closing line."),
)

api_key = option(
    "--api-key",
    "Key of the vast.ai account; asked for at a terminal. Others see arguments: better give it as VAST_API_KEY.",
    envvar="VAST_API_KEY",
    default=None,
)

rented = group(
    click.option("--vastai", is_flag=True, help="Rent the machines on vast.ai."),
    option(
        "--hosts",
        "Machines of yours that ssh reaches, one stage each; more of them than stages are spares.",
        metavar="USER@A,USER@B,...",
    ),
    api_key,
    click.option("--vast-url", envvar="PP_VAST_URL", default="https://console.vast.ai", hidden=True),
    option(
        "--image",
        "What a rented machine runs: docker/Dockerfile, pushed where it can be pulled.",
        default=IMAGE,
        envvar="PP_IMAGE",
    ),
    option(
        "--node-command",
        "How a machine of --hosts starts a node.",
        default="pp-node",
    ),
    option("--max-price", "Most dollars an hour for one machine.", type=Number(min=0, min_open=True), default=1.0),
    option(
        "--min-vram",
        "Least GB of GPU memory.  [default: what the plan needs]",
        type=Number(min=0, min_open=True),
    ),
    option("--gpu", "Part of a GPU's name, preferred where there is a choice.", default="", metavar="NAME"),
    option("--region", "A country's two letters, or europe, north-america, asia, ...", default="", metavar="REGION"),
    option("--min-down", "Least Mbit/s that a machine downloads.", type=Number(min=0), default=100.0),
    option("--disk", "GB of disk for image and model.  [default: what they need]", type=Number(8, 10_000)),
    click.option("--spot", is_flag=True, help="Bid for machines that may be taken away at any time; cheaper."),
    option("--budget-usd", "End everything when so many dollars are spent.", type=Number(min=0, min_open=True)),
    option(
        "--deadline",
        "End everything after so long, such as 90s, 5m or 2h; machines stop working then by themselves.",
        type=Duration(),
    ),
    option(
        "--worker-hf-token",
        "A Hugging Face token that the machines get, for a gated model; yours is not sent. Give it as "
        "PP_WORKER_HF_TOKEN: others see arguments.",
        envvar="PP_WORKER_HF_TOKEN",
        show_envvar=False,
        default=None,
    ),
    click.option("--yes", "-y", is_flag=True, help="Ask nothing."),
    click.option("--dry-run", is_flag=True, help="Show which machines would be rented and for how much; rent nothing."),
)

named = option("--cluster", "Use a cluster that pp up holds, instead of starting one here.", metavar="NAME")

max_tokens = option("--max-tokens", "Most tokens to generate.", type=click.IntRange(1, MAX_TOKENS), default=256)

sampling = group(
    option("--temperature", "0 takes the likeliest token.", type=Number(0, MAX_TEMPERATURE), default=0.0),
    option("--top-k", "Sample among the k likeliest; 0: all.", type=click.IntRange(0, MAX_TOP_K), default=0),
    option(
        "--top-p",
        "Sample among the likeliest that reach this probability.",
        type=Number(MIN_TOP_P, 1),
        default=1.0,
    ),
    option(
        "--seed",
        "Makes sampling repeatable.  [default: a fresh one]",
        type=click.IntRange(0, (1 << 64) - 1),
    ),
)

answer = group(
    option("--system", "What the model is told about its part, before everything else.", metavar="TEXT"),
    option(
        "--stop",
        "End the answer before this text, which is not shown; several may be given.",
        metavar="TEXT",
        multiple=True,
    ),
    option(
        "--presence-penalty",
        "Makes tokens that the answer has already less likely; below 0: likelier.",
        type=Number(-MAX_PENALTY, MAX_PENALTY),
        default=0.0,
    ),
    option(
        "--frequency-penalty",
        "The same, for each time that it has them.",
        type=Number(-MAX_PENALTY, MAX_PENALTY),
        default=0.0,
    ),
)

logprobs = option(
    "--logprobs",
    "With --json: each token's log-probability, and those of the N likeliest in its place.",
    type=click.IntRange(0, MAX_LOGPROBS),
    metavar="N",
)

prompt = group(
    click.argument("prompt", required=False),
    option(
        "--chat",
        'Chat messages: [{"role": "user", "content": "..."}, ...]',
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE.json",
    ),
    option("--tokens", "Token ids instead of text.", metavar='"1,2,3"'),
    click.option("--raw", is_flag=True, help="The prompt as it is, without the model's chat template."),
)

flower = click.option("--flower", is_flag=True, help="Start Flower for it too: Celery's own page, on this machine.")

as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
