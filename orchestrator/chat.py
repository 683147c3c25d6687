"""`pp chat`: a conversation with the model. Answers go to stdout, everything else to stderr, so that a script's answers
can be kept: `pp chat < questions.txt > answers.txt`."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from orchestrator import asked, conversation, launch, options, tables
from orchestrator.conversation import Conversation
from orchestrator.job import Job, cancelled
from orchestrator.signals import check, held, ignore, interruptible, stoppable
from orchestrator.terminal import print_text, tell
from orchestrator.typed import Typed
from pptasks.errors import RequestError, RequestFailed, StorageError
from pptasks.request import MAX_TOKENS, Request
from pptasks.shown import plain

FAILED = 1
_CLEAR = "/clear begins a new conversation"
_NO_COMMAND = "begin with a blank if it is no command; /help lists those that there are"
HELP = """\
/clear          forget the conversation
/system TEXT    what the model is told about its part; alone it shows that, and "/system -" takes it away
/save FILE      write the conversation to a file, which pp run --chat and pp chat --history read
/retry          answer the last question again
/exit           end; Ctrl-D does too
Ctrl-C stops an answer. A line that ends with \\ goes on in the next; one that begins with a blank is no command."""
_COMMAND = re.compile(r"/([a-z]+)(?:[ \t]+(.*))?", re.ASCII | re.DOTALL)
_TOLD = (RequestError, RequestFailed, StorageError)  # the pipeline is still there: the chat goes on


@click.command(context_settings=options.HELP)
@options.model
@options.option("--max-tokens", "Most tokens of an answer.", type=click.IntRange(1, MAX_TOKENS), default=512)
@options.sampling
@options.answer
@options.option(
    "--history",
    "Keep the conversation in this file, and go on with what it holds.",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
)
@options.cluster
@options.named
def chat(history: Path | None, system: str | None, **given: Any) -> None:
    """Chat with the model. Start the stages here, and leave nothing behind.

    Each line is a question; /help lists what else may be typed. Ctrl-C stops an answer and not the chat; a second one,
    Ctrl-D or /exit ends it. Questions may be piped in: then stdout has the answers and nothing else, and the exit code
    is 1 if any question got none.
    """
    begun = conversation.load(history) if history else Conversation()
    begun = begun if system is None else begun.led_by(system)
    wanted = asked.answer(given)
    Request(messages=begun.asked("-").messages, **wanted)  # what is wrong is told before anything starts
    if history:
        conversation.save(history, begun)
    typed = Typed()
    with launch.cluster(given, Console(stderr=True)) as (cluster, model):
        job, is_quiet = Job(cluster, given["timeout"]), given["quiet"]
        made = Chat(job, wanted, begun, typed, file=history, context=cluster.plan.context, is_quiet=is_quiet)
        if typed.is_terminal and not is_quiet:
            _say(f"{model.name}, {cluster.plan.n_stages} stages; /help lists the commands")
        made.run()
    if made.failed and not typed.is_terminal:
        sys.exit(FAILED)


class Chat:
    """One conversation. `failed`: whether anything that was asked for was not done."""

    def __init__(
        self,
        job: Job,
        wanted: Mapping[str, Any],
        begun: Conversation,
        typed: Typed,
        *,
        file: Path | None,
        context: int,
        is_quiet: bool,
    ):
        """wanted: of each answer, for `Request`. file: where the conversation is kept. context: its most tokens."""
        self._job, self._wanted, self._typed, self._file = job, wanted, typed, file
        self._context, self._is_quiet = context, is_quiet
        self._conversation = begun
        self._last = begun.before_last()  # question, and what came before it: /retry asks it again
        self._tries = 0  # of the last question; a seed that was given is another one in each
        self._was_stopped = False  # by Ctrl-C, since something was typed
        self._end = ""  # the last character of an answer that was shown
        self._is_over = self.failed = False

    def run(self) -> None:
        """Until the end of what is typed. Raises what ends the pipeline, and KeyboardInterrupt for a signal that ends
        the command."""
        self._typed.remember(m["content"] for m in self._conversation.said if m["role"] == "user")
        with stoppable() if self._typed.is_terminal else held():
            while not self._is_over:
                try:
                    self._turn()
                except _TOLD as e:
                    tell(e)
                    self.failed = True
                check()
            ignore()  # whoever is impatient now must not disturb how we end

    def _turn(self) -> None:
        text = self._read()
        if text is None:
            self._is_over = True
        elif command := _COMMAND.fullmatch(text.rstrip()):
            self._obey(command[1], command[2] or "")
        elif text.strip():
            self._tries = 0
            self._ask(self._conversation, text)

    def _read(self) -> str | None:
        """The next message; None at the end, which a Ctrl-C that follows another is too."""
        while True:
            try:
                with interruptible():
                    text = self._typed.read()
            except KeyboardInterrupt:
                if self._typed.is_terminal:
                    click.echo(err=True)  # the line that it came in ends here
                check()
                if self._typed.was_begun:  # which it threw away
                    self._was_stopped = False
                elif self._was_stopped:
                    return None
                else:
                    self._was_stopped = True
                    _say("Ctrl-C again, Ctrl-D or /exit ends the chat")
                continue
            self._was_stopped = False
            if text is None and self._typed.is_terminal:
                click.echo(err=True)
            return text

    def _ask(self, before: Conversation, question: str) -> None:
        self._last = before, question
        seed = self._wanted["seed"]
        wanted = self._wanted if seed is None else {**self._wanted, "seed": (seed + self._tries) % (1 << 64)}
        request = Request(messages=before.asked(question).messages, **wanted)
        answer = self._answer(request)
        if answer["text"] or answer["finish_reason"] != "cancelled":
            self._change(before.asked(question).answered(answer["text"]))
        if not self._is_quiet:
            closing = tables.turn_line(answer, self._context)
            Console(stderr=True).print(closing, style="dim", markup=False, highlight=False, soft_wrap=True)
        if answer["finish_reason"] == "length" and answer["completion_tokens"] < request.max_tokens:
            _say(f"the context of {self._context} tokens is full: {_CLEAR}, pp chat --context N has room for more")

    def _answer(self, request: Request) -> dict[str, Any]:
        """What the head says of its answer, which is shown as it comes. Raises RequestError with what to do."""
        finish, self._end = "failed", ""
        try:
            with interruptible():
                answer = self._job.run(request, self._show)
            finish = answer["finish_reason"]
        except KeyboardInterrupt:  # before anything was asked, or when all was over
            check()
            answer, finish = cancelled([], []), "cancelled"
        except RequestError as e:
            raise RequestError(f"{e}; {_CLEAR}") from None
        finally:
            is_open = self._end != "\n" if self._end else finish != "failed"
            if is_open or finish == "cancelled":  # the terminal has written ^C
                print_text("\n")
        self._was_stopped = finish == "cancelled"
        return answer

    def _show(self, text: str) -> None:
        self._end = text[-1:] or self._end
        print_text(text)

    def _obey(self, command: str, rest: str) -> None:
        """Raises RequestError for what cannot be done, StorageError."""
        takes_text = {"system": True, "save": True, "help": False, "clear": False, "retry": False, "exit": False}
        if command not in takes_text:
            raise RequestError(f"there is no command /{command}; {_NO_COMMAND}")
        if rest and not takes_text[command]:
            raise RequestError(f"/{command} takes nothing after it; {_NO_COMMAND}")
        if command == "help":
            _say(HELP)
        elif command == "exit":
            self._is_over = True
        elif command == "clear":
            self._last = None
            self._change(self._conversation.cleared())
            _say("a new conversation begins")
        elif command == "retry":
            self._retry()
        elif command == "save":
            self._save(rest)
        else:
            self._system(rest)

    def _retry(self) -> None:
        if self._last is None:
            raise RequestError("nothing was asked yet: there is nothing to retry")
        self._tries += 1
        self._ask(*self._last)

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save FILE: give the name of a file")
        path = Path(name).expanduser()
        conversation.save_as(path, self._conversation)
        _say(f"{len(self._conversation.messages)} messages are in {path}")

    def _system(self, text: str) -> None:
        if not text:
            _say(self._conversation.system or "the model is told nothing")
            return
        system = None if text == "-" else text
        changed = self._conversation.led_by(system)
        Request(messages=changed.asked("-").messages)
        if self._last is not None:
            self._last = self._last[0].led_by(system), self._last[1]
        self._change(changed)
        _say("the model is told that from now on" if system else "the model is told nothing")

    def _change(self, conversation_now: Conversation) -> None:
        """Raises StorageError."""
        self._conversation = conversation_now
        if self._file is not None:
            conversation.save(self._file, conversation_now)


def _say(text: str) -> None:
    click.echo(plain(text), err=True)
