"""The command line's options, by what they are about; each command takes the groups that it needs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from orchestrator.run import EMBEDDED
from pptasks.config import MAX_CHUNK, MAX_CONTEXT, MAX_SLOTS, MAX_STAGES
from pptasks.request import MAX_TEMPERATURE, MAX_TOKENS, MAX_TOP_K, MIN_TOP_P

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.FloatRange):
    """A range that "nan" is not in."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


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
        "https://.../x.gguf, a .gguf file, or a Hugging Face folder.",
        default="smollm2:135m",
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
    option("--slots", "Sequences in flight at once.", type=click.IntRange(1, MAX_SLOTS), default=4),
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
        "iroh's relays for --link iroh; none stays on this machine's own addresses.",
        default="none",
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

as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
