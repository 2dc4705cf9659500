"""Conversations, each position's label being the next token of an answer."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.datasets import Dataset, prepare_integers
from fedjax_pfl.data.preparation import words as words_of
from fedjax_pfl.data.sources import rows, text
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError, in_one_line

PREFIX = "chat:"  # of names of data sets
Message = dict[str, str]  # role and content
LENGTH = 512  # tokens of a conversation
# names of the writers in files -> those that chat templates know
_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt"), "assistant"),
    "system": "system",
}
# of lists of messages: the column, a message's writer, and its text
_LISTS = (("messages", "role", "content"), ("conversations", "from", "value"))
_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")
_OWN = ("instruction", *_INPUTS, *_OUTPUTS, *(name for name, *_ in _LISTS))
PLAIN = (  # a template where the tokenizer has none
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_EXAMPLE = (
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
)
Render = Callable[[Sequence[Message], bool], str]


def messages(
    named: str, row: Mapping[str, Any], answered: bool = True
) -> list[Message]:
    """Returns the messages of a row: of `messages` (role, content), of `conversations`
    (from, value; ShareGPT), or of `instruction`, `input` or `context`, and `output` or
    `response` (Alpaca, Dolly).

    Args:
      named: begins messages of errors, such as FILE: row 3.
      answered: false allows a row without an answer.

    Raises:
      InputError: the row has none of them, a writer is unknown, or nothing is answered.
    """
    for column, writer, content in _LISTS:
        if column in row:
            given = row[column]
            if not isinstance(given, list) or not given:
                raise InputError(
                    f"{named}: {column} must be a list of messages, got {given!r:.40}."
                )
            found = [_message(named, x, writer, content) for x in given]
            break
    else:
        answer = next((row[x] for x in _OUTPUTS if x in row), None if answered else "")
        more = next((row[x] for x in _INPUTS if row.get(x)), None)
        asked = [row.get("instruction"), *([more] if more else [])]
        if not all(isinstance(x, str) for x in (*asked, answer)):
            raise InputError(
                f"{named} must have messages, conversations, or the texts instruction "
                f"and output, got {', '.join(map(repr, row))}."
            )
        found = [
            {"role": "user", "content": "\n\n".join(map(str, asked))},
            {"role": "assistant", "content": str(answer)},
        ]
    if answered and all(message["role"] != "assistant" for message in found):
        raise InputError(f"{named} must have an answer: a message of the assistant.")
    return found


def _message(named: str, given: Any, writer: str, content: str) -> Message:
    known = isinstance(given, dict) and isinstance(given.get(content), str)
    role = given.get(writer) if known else None
    if not isinstance(role, str) or role not in _ROLES:
        raise InputError(
            f"{named}: a message must have {writer}, one of {', '.join(_ROLES)}, and "
            f"the text {content}, got {given!r:.60}."
        )
    return {"role": _ROLES[role], "content": given[content]}


def template(tokenizer: str) -> Render:
    """Returns the chat template of a tokenizer: (messages, whether the beginning of an
    answer follows) -> text.

    It is that of chat_template.jinja or tokenizer_config.json next to tokenizer.json,
    or else `PLAIN`. It runs in jinja2's sandbox.

    Raises:
      InputError: it cannot be read or fails.
    """
    path = Path(tokenizer).expanduser()
    settings, own = files(path)
    config, source = {}, PLAIN
    if path.suffix == ".json" and settings.exists():
        config = _read(settings)
    given = config.get("chat_template", source)
    if isinstance(given, list):  # several with a name
        given = {x["name"]: x["template"] for x in given}.get("default", source)
    if path.suffix == ".json" and own.exists():
        given = own.read_text(encoding="utf-8")
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and value is not None
    }
    return functools.partial(_rendered, _compiled(given, str(path.parent)), special)


def files(tokenizer: Path) -> tuple[Path, Path]:
    """Returns where the settings and the chat template of a tokenizer.json are, if they
    are there."""
    folder = tokenizer.parent
    return folder / "tokenizer_config.json", folder / "chat_template.jinja"


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({in_one_line(error)}).") from error
    return found


def _compiled(source: str, named: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    extensions = ["jinja2.ext.loopcontrols"]
    space = {"trim_blocks": True, "lstrip_blocks": True}  # as in transformers
    environment = ImmutableSandboxedEnvironment(**space, extensions=extensions)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        message = f"The chat template of {named} fails ({in_one_line(error)})."
        raise InputError(message) from error


def _rendered(
    compiled: Any, special: Mapping[str, str], given: Sequence[Message], answer: bool
) -> str:
    from jinja2 import TemplateError

    try:
        return str(
            compiled.render(messages=given, add_generation_prompt=answer, **special)
        )
    except TemplateError as error:
        raise InputError(f"The chat template fails ({in_one_line(error)}).") from error


def answers(render: Render, given: Sequence[Message]) -> tuple[str, list[range]]:
    """Returns the text of a conversation, and where its answers stand.

    Raises:
      InputError: the template does not write a message after the ones before it.
    """
    whole, found = render(given, False), list[range]()
    for i, message in enumerate(given):
        if message["role"] == "assistant":
            before, after = render(given[:i], True), render(given[: i + 1], False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise InputError(
                    "The chat template must write each message after the ones before "
                    "it, so that answers have a place."
                )
            found.append(range(len(before), len(after)))
    return whole, found


def ending(tokenizer: str) -> str:
    """Returns the text that a template writes after an answer, without spaces around
    it, or a line end."""
    whole = template(tokenizer)(_EXAMPLE, False)
    after = whole.rpartition(_EXAMPLE[-1]["content"])[2]
    return after.strip() or after[:1]


def prompts(
    path: str,
    given: Sequence[Mapping[str, Any]],
    tokenizer: str,
    words: Sequence[str],
    length: int,
) -> np.ndarray:
    """Returns conversations up to their last answer, which is left out: [n, L] tokens
    in a vocabulary. Of a longer one the last L are kept.

    Args:
      path: begins messages of errors.
      given: rows [n] as of `messages`; answers may be missing.
    """
    render, tokens = template(tokenizer), text.places(tokenizer)
    number, found = {word: i for i, word in enumerate(words)}, []
    for i, row in enumerate(given):
        asked = messages(f"{path}: row {i + 1}", row, answered=False)
        if asked[-1]["role"] == "assistant":
            asked = asked[:-1]
        known = [number.get(x, text.UNKNOWN) for x in tokens(render(asked, True))[0]]
        found.append(known[-length:])
    return text.padded(found, length)


@register(
    "chat:PATH",
    "conversations, of which answers are learned: .json or .jsonl rows of messages, of "
    "conversations, or of instruction, input and output (.gz too)",
)
def load(
    path: str, tokenizer: str | None = None, max_length: int | None = None
) -> Dataset:
    """Reads conversations; labels are the next tokens of answers, -1 elsewhere.

    Args:
      path: .json or .jsonl rows as of `messages`, with further columns, such as that of
        the clients, and optionally `split` (train, val or test).
      tokenizer: `char` (default), `word`, or a tokenizer.json, whose chat template is
        used.
      max_length: L; a longer conversation is cut. Default 512.

    Raises:
      InputError: the file cannot be read or has other content.
    """
    given, name = rows.objects(path), tokenizer or "char"
    render, tokens = template(name), text.places(name)
    length = max_length or LENGTH
    found, kept = list[tuple[list[str], np.ndarray]](), list[int]()
    cut = 0
    for i, row in enumerate(given):
        named = f"{path}: row {i + 1}"
        try:
            whole, spans = answers(render, messages(named, row))
        except InputError as error:
            raise InputError(_placed(named, str(error))) from error
        words, starts = tokens(whole)
        learned = np.array([any(x in span for span in spans) for x in starts], bool)
        if learned[1 : length + 1].any():
            kept.append(i)
            cut += len(words) > length + 1
            found.append((words[: length + 1], learned[: length + 1]))
    if not found:
        raise InputError(f"{path} must have an answer within {length} tokens.")
    others = [{k: v for k, v in given[i].items() if k not in _OWN} for i in kept]
    counts = {
        f"conversations without an answer in {length} tokens left out": len(given)
        - len(kept),
        f"conversations cut to {length} tokens": cut,
    }
    notes = [f"{name}: {count}" for name, count in counts.items() if count]
    return _dataset(path, found, others)._replace(note="; ".join(notes))


def _placed(named: str, message: str) -> str:
    return message if message.startswith(named) else f"{named}: {message}"


def _dataset(
    path: str,
    found: Sequence[tuple[list[str], np.ndarray]],
    others: Sequence[dict[str, Any]],
) -> Dataset:
    """Returns tokens with marks of those that are learned as a data set."""
    numbers, words = text.numbered(tokens for tokens, _ in found)
    length = max(map(len, numbers)) - 1
    x = text.padded([ids[:-1] for ids in numbers], length)
    y = np.full_like(x, -1)
    for row, ids, (_, learned) in zip(y, numbers, found, strict=True):
        row[: len(ids) - 1] = np.where(learned[1:], ids[1:], -1)
    columns, num_train, validation = dict[str, np.ndarray](), len(x), None
    if any(others):
        frame = rows.frame(path, list(others), lambda column: True)
        order, num_train, validation = rows.split(path, frame)
        columns = {name: words_of(frame[name]) for name in frame if name != "split"}
        if order is not None:
            x, y = x[order], y[order]
            columns = {name: cells[order] for name, cells in columns.items()}
    return Dataset(
        f"chat:{path}",
        x,
        y,
        num_train,
        len(words),
        prepare_integers,
        words=words,
        columns=columns,
        validation=validation,
    )
