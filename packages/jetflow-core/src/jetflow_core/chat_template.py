"""Chat templates: messages checked against what a template can express, then rendered in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from jinja2 import meta, nodes

from jetflow_core.template_sandbox import UNITS, TemplateEnvironment, work_budget

Message = Mapping[str, object]

ROLES = ("system", "user", "assistant", "tool", "developer")
UNITS_PER_CHARACTER = 64  # more work is fine for a long conversation


class ChatTemplate:
    """A compiled template.

    Attributes:
        variables: names it reads from outside, e.g. "messages", "tools", "enable_thinking".
        words: the attribute names and text constants in it: what it knows of roles and message fields.
        thinks: whether it writes or reads `<think>` blocks.
    """

    def __init__(self, source: str) -> None:
        """Compile. Raises `ValueError` when the source is not a template or not one the sandbox takes."""
        environment = TemplateEnvironment()
        try:
            tree = environment.parse_charged(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree)) - environment.globals.keys()
            self._template = environment.from_string(tree)
        except Exception as error:  # any parser or compiler failure is the template's fault
            raise ValueError(f"chat template cannot be used: {type(error).__name__}: {error}") from None
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.thinks = "</think>" in source or "<think>" in source
        self.words = frozenset(constants | {node.attr for node in tree.find_all(nodes.Getattr)})

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
        variables: Mapping[str, object],
    ) -> str:
        """The prompt text.

        Args:
            messages: as `prepare_messages` returns them.
            tools: function declarations.
            add_generation_prompt: whether to open the assistant's turn.
            special_tokens: texts of "bos_token" and the like.
            variables: further names the template reads.

        Raises:
            ValueError: for tools or variables the template does not read, and for anything that fails in it.
        """
        for name in (*variables, *(("tools",) if tools else ())):
            if name not in self.variables:
                raise ValueError(f"this model's chat template does not read {name!r}, so it cannot be honoured")
        size = text_size((messages, tools, variables))
        names: dict[str, object] = {
            **special_tokens,
            **variables,
            "messages": messages,
            "tools": tools or None,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with work_budget(UNITS + UNITS_PER_CHARACTER * size) as budget:
                pieces: list[str] = []
                for piece in self._template.generate(names):
                    budget.spend(len(piece))
                    pieces.append(piece)
                return "".join(pieces)
        except Exception as error:  # whatever fails inside a template is the template's or the messages' fault
            raise ValueError(f"chat template failed: {error or type(error).__name__}") from None


def text_size(value: object) -> int:
    """Characters of all texts in nested JSON-like data, plus one for every member."""
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, Mapping):
        value = [item for pair in cast("Mapping[object, object]", value).items() for item in pair]
    if isinstance(value, list | tuple):
        return 1 + sum(map(text_size, cast("Sequence[object]", value)))
    return 1


def prepare_messages(messages: Sequence[Message], template: ChatTemplate) -> list[dict[str, object]]:
    """Messages as templates read them: text parts joined, absent fields dropped, "developer" as "system" and reasoning as a
    `<think>` block where needed.

    Raises `ValueError` naming the message and what `template` cannot express; nothing is dropped silently.
    """
    if not messages:
        raise ValueError("messages must not be empty")
    return [_prepare(index, message, template) for index, message in enumerate(messages)]


def _prepare(index: int, message: Message, template: ChatTemplate) -> dict[str, object]:
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}: role = {role!r}: known are {', '.join(ROLES)}")
    if role == "developer" and "developer" not in template.words:
        role = "system"  # the same meaning under the name the model was trained with
    if role == "tool" and "tool" not in template.words:
        raise ValueError(f"{where}: this model's chat template has no role 'tool'")
    prepared: dict[str, object] = {"role": role, "content": _join_text(where, message.get("content"))}
    if (thought := message.get("reasoning_content")) and template.thinks and "reasoning_content" not in template.words:
        # The form in which the model wrote it; such templates take it out of the text where they want to.
        prepared["content"] = f"<think>\n{thought}\n</think>\n\n{prepared['content']}"
        message = {**message, **prepared, "reasoning_content": None}
    for key, value in message.items():
        if key in prepared or value is None or value == []:
            continue
        # The order of tool results says which call they answer, so a template may leave the id out.
        if key not in template.words and not (key == "tool_call_id" and role == "tool"):
            raise ValueError(f"{where}: this model's chat template cannot express the field {key!r}")
        prepared[key] = value
    if message.get("content") is None and not prepared.keys() & {"tool_calls", "reasoning_content"}:
        raise ValueError(f"{where}: content is missing")
    return prepared


def _join_text(where: str, content: object) -> str:
    """A message's text; the parts of a list are joined with nothing between them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: content must be text or a list of text parts")
    texts: list[str] = []
    for number, part in enumerate(cast("list[object]", content)):
        fields = cast("Mapping[str, object]", part) if isinstance(part, Mapping) else {}
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            kind = fields.get("type", type(part).__name__)
            raise ValueError(f"{where}: content part {number} of type {kind!r}: only text is supported")
        texts.append(text)
    return "".join(texts)
