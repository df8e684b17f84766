"""`stoker chat` as people meet it, in a pipe and in a terminal, and the conversation behind it."""

import json
import os
import pickle
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stoker.cli.conversation import Conversation, Piece
from stoker.engine.event import Event, Finish, Stats
from stoker.engine.tokenizer import Tokenizer
from stoker.engine.worker.client import EngineClient
from stoker.engine.worker.messages import Command, Events, RequestBody, Submit
from stoker.errors import RequestError
from stoker.sampling.settings import Sampling
from tests.support.random_checkpoint import small_config, write_random_checkpoint
from tests.support.tokenizer import write_byte_tokenizer

STOKER = [sys.executable, "-c", "from stoker.cli.main import run; run()"]
PATIENCE_S = 60.0
LONG = "You are the stoker of a steam ship, and you never leave the fire alone for long. How do you begin your day?"


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends an answer by itself."""
    directory = tmp_path_factory.mktemp("talkative") / "model"
    write_random_checkpoint(directory, small_config(eos_token_id=[]))
    write_byte_tokenizer(directory)
    (directory / "generation_config.json").unlink()
    return directory


def chat(directory: Path, lines: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STOKER, "chat", "--model", str(directory), *options],
        input=lines,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )


def letters(text: str) -> str:
    """What survives a terminal: a random model writes many bytes that are no text."""
    return "".join(letter for letter in text if letter.isascii() and letter.isprintable())


def test_lines_of_a_pipe_are_a_conversation(talkative: Path) -> None:
    options = ("--max-tokens", "24", "--temperature", "0.8", "--seed", "3")
    lines = f"{LONG}\nAnd now?\n\n/stats\n/reset\n{LONG}\n/help\n/exit\nnever read\n"
    plain, drafted = (chat(talkative, lines, *options, "--draft", draft) for draft in ("none", "mtp:2"))
    for done in (plain, drafted):
        assert done.returncode == 0, done.stderr
        costs = re.findall(
            r"24 tokens · [\d.]+ tokens/s · [\d.]+ tokens/step · (\d+) in \((\d+) cached\) · .* · cut off", done.stderr
        )
        # the history goes along, and what the cache has of it is not computed again
        (first, cold), (second, warm), (again, known) = [(int(tokens), int(cached)) for tokens, cached in costs]
        assert second > first + len("And now?")
        assert again == first
        assert cold == 0
        assert known >= first - 64
        assert warm >= first - 64 - len("Xassistant\nX\n\nX\n\n")  # the empty thought is not repeated
        assert re.search(r"2 answers · \d+ tokens in \(\d+ cached\), 48 out", done.stderr)
        assert "A new conversation." in done.stderr
        assert "/reset" in done.stderr
    assert drafted.stdout == plain.stdout
    alone = subprocess.run(
        [*STOKER, "generate", "--model", str(talkative), "--prompt", LONG, "--chat", "--json", *options],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answer = letters(json.loads(alone.stdout)["text"])
    assert answer
    assert letters(plain.stdout).startswith(answer)
    assert letters(plain.stdout).endswith(answer)  # /reset forgets


@pytest.mark.parametrize(
    ("options", "lines", "words"),
    [
        (("--max-tokens", "0"), "", "max_tokens is 0, expected at least 1"),
        (("--draft", "dflash:4"), "Hi\n", "drafter does not exist"),
        (("--context", "64"), f"{'x' * 64}\n", "tokens with this message, and the context is 64: there is no room"),
    ],
)
def test_in_a_pipe_the_first_mistake_ends_it(talkative: Path, options: tuple[str, ...], lines: str, words: str) -> None:
    done = chat(talkative, lines, *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


class Screen:
    """A terminal with `stoker chat` in it."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in parallel may have it ignored
            os.execv(STOKER[0], [*STOKER, "chat", "--model", str(directory), *options])
        self.shown = ""
        self._mark = 0

    def wait_for(self, words: str) -> None:
        """Until these words have appeared since the last ones waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.shown[self._mark :]:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._file], [], [], 0.1)[0]:
                self.shown += os.read(self._file, 1 << 16).decode(errors="replace")
        self._mark = self.shown.index(words, self._mark) + len(words)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def settle(self) -> None:
        """Until line editing waits for a key: a signal between the prompt and that moment is seen only after a key."""
        state = Path(f"/proc/{self.pid}/stat")
        idle = 0
        while idle < 10:
            idle = idle + 1 if state.read_text().rpartition(")")[2].split()[0] == "S" else 0
            time.sleep(0.05)

    def engine(self) -> int:
        """The engine process: the child that loads the model, not the one that counts resources."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return next(int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes())

    def leave(self) -> int:
        """Ctrl-D. -> exit status."""
        self.type("\x04")
        return os.waitpid(self.pid, 0)[1]


@pytest.fixture
def screen(talkative: Path) -> Iterator[Screen]:
    screen = Screen(talkative, "--max-tokens", "6000")
    yield screen
    with suppress(ProcessLookupError):
        os.kill(screen.pid, signal.SIGKILL)


def test_in_a_terminal_control_c_stops_the_answer_and_a_killed_engine_is_started_again(screen: Screen) -> None:
    screen.wait_for("8,192 tokens of context · drafting: none")
    screen.wait_for("> ")
    screen.settle()
    screen.type("\x03")  # goes to the engine as well, as to every process of a terminal
    screen.wait_for("Nothing is running.")
    screen.type("Tell me everything\r")
    screen.wait_for("everything")
    time.sleep(0.5)
    screen.type("\x03")
    screen.wait_for("· stopped")
    screen.type("/fly\r")
    screen.wait_for("unknown command /fly; known commands: /help, /reset, /stats, /exit.")

    screen.type("And the rest\r")
    screen.wait_for("the rest")
    time.sleep(0.5)
    os.kill(screen.engine(), signal.SIGKILL)
    screen.wait_for("was killed by SIGKILL")
    screen.wait_for("> ")
    screen.type("/stats\r")
    screen.wait_for("1 answer · ")
    screen.type("Once more\r")
    screen.wait_for("more")
    time.sleep(0.5)
    screen.type("\x03")
    screen.wait_for("· stopped")
    screen.wait_for("> ")
    assert screen.leave() == 0
    assert "Traceback" not in screen.shown


# -- the conversation, with an engine that says what it is told to


class Parrot(EngineClient):
    """Answers every request at once with the next of its `lines`, a byte token at a time, and remembers the prompts."""

    def __init__(self, tokenizer: Tokenizer, *lines: str) -> None:
        super().__init__()
        self._tokenizer, self._lines = tokenizer, list(lines)
        self.asked: list[RequestBody] = []
        self._latest = -1  # request

    def close(self, drain: bool = False, timeout: float | None = None) -> None: ...

    def _send(self, command: Command) -> None:
        if isinstance(command, Submit):
            self.asked.append(pickle.loads(command.body))
            self._latest = command.request_id

    def speak(self, finish: Finish = Finish.STOP) -> None:
        tokens = self._tokenizer.encode(self._lines.pop(0))
        events = [Event(self._latest, (token,)) for token in tokens]
        self._deliver(Events([*events, Event(self._latest, (), finish, stats=Stats(output_tokens=len(tokens)))]))


@pytest.fixture(scope="module")
def tokenizer(talkative: Path) -> Tokenizer:
    return Tokenizer(talkative)


def turn(conversation: Conversation, parrot: Parrot, text: str, finish: Finish = Finish.STOP) -> list[Piece]:
    reply = conversation.ask(text)
    parrot.speak(finish)
    pieces = list(reply)
    conversation.keep(text, reply)
    return pieces


def test_thoughts_are_shown_as_such_and_not_kept(tokenizer: Tokenizer) -> None:
    parrot = Parrot(tokenizer, "<think>\nhm</think>\n\nYes.", "No <think>.")
    conversation = Conversation(parrot, tokenizer, Sampling(50), context=8192, system="Be brief.")
    pieces = turn(conversation, parrot, "Is it?")
    assert "".join(piece.text for piece in pieces if piece.thought) == "hm"
    assert "".join(piece.text for piece in pieces if not piece.thought) == "Yes."
    turn(conversation, parrot, "Sure?")
    assert [(message["role"], message["content"]) for message in conversation.messages] == [
        ("system", "Be brief."),
        ("user", "Is it?"),
        ("assistant", "Yes."),
        ("user", "Sure?"),
        ("assistant", "No <think>."),
    ]
    assert list(parrot.asked[1].prompt) == tokenizer.encode_chat(conversation.messages[:4])
    # the prefix cache is told where the next turn's prompt will part from this one
    first, second = (list(command.prompt) for command in parrot.asked)
    (boundary,) = parrot.asked[0].boundaries
    assert first[:boundary] == second[:boundary]
    assert tokenizer.decode(first[boundary:]).startswith("assistant")
    assert [cost.output_tokens for cost in conversation.costs] == [11, 5]  # a tag is one token


def test_a_stopped_answer_is_kept_as_far_as_it_came_and_nothing_of_one_that_had_not_begun(tokenizer: Tokenizer) -> None:
    parrot = Parrot(tokenizer, "Well, I", "<think>hm", "")
    conversation = Conversation(parrot, tokenizer, Sampling(50), context=8192)
    turn(conversation, parrot, "One", Finish.CANCELLED)
    assert [message["content"] for message in conversation.messages] == ["One", "Well, I"]
    turn(conversation, parrot, "Two", Finish.CANCELLED)
    assert [message["content"] for message in conversation.messages] == ["One", "Well, I"]
    turn(conversation, parrot, "Three")
    assert [message["content"] for message in conversation.messages] == ["One", "Well, I", "Three", ""]
    conversation.reset()
    assert conversation.messages == []


def test_an_answer_gets_the_room_that_is_left(tokenizer: Tokenizer) -> None:
    parrot = Parrot(tokenizer, "a")
    conversation = Conversation(parrot, tokenizer, Sampling(50), context=60)
    prompt = len(tokenizer.encode_chat([{"role": "user", "content": "Hello"}]))
    turn(conversation, parrot, "Hello")
    assert parrot.asked[0].sampling.max_tokens == 60 - prompt
    with pytest.raises(
        RequestError, match=r"the context is 60: there is no room for an answer\. Begin anew with /reset"
    ):
        conversation.ask("x" * 50)


def test_not_thinking_is_asked_of_the_template(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}><think>"
        "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
    )
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", template)
    for think, shown in ((True, [Piece("a", True), Piece("b", False)]), (False, [Piece("a</think>b", False)])):
        parrot = Parrot(tokenizer, "a</think>b")
        conversation = Conversation(parrot, tokenizer, Sampling(50), context=8192, think=think)
        assert merged(turn(conversation, parrot, "x")) == shown
        assert tokenizer.decode(list(parrot.asked[0].prompt)) == ("x><think>" if think else "x><think></think>")


def merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    whole: list[Piece] = []
    for piece in pieces:
        if whole and whole[-1].thought == piece.thought:
            whole[-1] = Piece(whole[-1].text + piece.text, piece.thought)
        else:
            whole.append(piece)
    return whole
