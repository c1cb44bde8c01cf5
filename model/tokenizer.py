"""Text to token ids and back: the model's own pipeline from tokenizer.json or GGUF metadata, and its chat template."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from monograph.errors import CheckpointError, PromptError
from monograph.model import chat_template as chat_templates
from monograph.model.tokenizer_files import TokenizerFiles, TokenizerParts, read_tokenizer_files, register_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class Tokenizer:
    """Text to ids and back. Made by ``from_folder``, ``from_files`` or ``from_parts``.

    Attributes:
        backend: The pipeline of the tokenizers library, truncation and padding off.
        special_tokens: Content of each special token by its name ("bos_token", ...), as templates see them.
        chat_template: One template, several by name, or None for a base model.
        bos_token_id: Id of the token that begins a text, or None.
        eos_token_ids: Ids of the tokens that end a text; may be empty.
        replacements: Pairs applied, in order, to decoded text; empty for nearly every model.
    """

    def __init__(self, parts: TokenizerParts, eos_token_ids: Iterable[int] = ()) -> None:
        self.backend = parts.backend
        self.special_tokens: Mapping[str, str] = parts.special_tokens
        self.chat_template = parts.chat_template
        self.bos_token_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        self.replacements: tuple[tuple[str, str], ...] = _CLEAN_UP if parts.cleans_up else ()

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder.

        Args:
            path: The folder, or the tokenizer.json in it.

        Raises:
            CheckpointError: A file is missing, unreadable or wrong; the message names it.
        """
        path = Path(path)
        return cls.from_files(TokenizerFiles.in_folder(path.parent if path.name == "tokenizer.json" else path))

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> Tokenizer:
        """Read the tokenizer from files that may lie anywhere."""
        return cls(read_tokenizer_files(files))

    @classmethod
    def from_parts(
        cls,
        backend: Backend,
        *,
        bos_token: str | int | None = None,
        eos_token: str | int | None = None,
        unk_token: str | int | None = None,
        pad_token: str | int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
        add_bos_token: bool | None = None,
        add_eos_token: bool | None = None,
    ) -> Tokenizer:
        """Wrap a pipeline that was built elsewhere.

        Args:
            backend: The pipeline; taken over, not copied.
            bos_token: Text or id of the special token, as for the three that follow.
            eos_token: The same.
            unk_token: The same.
            pad_token: The same.
            eos_token_ids: More tokens that end a text.
            chat_template: One template, or several by name.
            add_bos_token: Whether ``encode`` begins a text with BOS; None leaves it to the pipeline's post-processor.
            add_eos_token: The same for EOS at the end.

        Raises:
            CheckpointError: A special token is an id that the pipeline does not have.
        """
        given = {"bos_token": bos_token, "eos_token": eos_token, "unk_token": unk_token, "pad_token": pad_token}
        named: dict[str, str] = {}
        for name, value in given.items():
            token = backend.id_to_token(value) if isinstance(value, int) else value
            if value is not None and token is None:
                raise CheckpointError(
                    f"{name}: id {value} is not in the vocabulary of {backend.get_vocab_size():,} tokens"
                )
            if token is not None:
                named[name] = token
        register_tokens(backend, named.values())
        backend.no_truncation()
        backend.no_padding()
        template = dict(chat_template) if isinstance(chat_template, Mapping) else chat_template
        self = cls(TokenizerParts(backend, named, template, cleans_up=False), eos_token_ids)
        if add_bos_token is not None or add_eos_token is not None:
            self._surround(bool(add_bos_token), bool(add_eos_token))
        return self

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size:,} tokens, {self.special_tokens})"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids.

        Warns where the text begins with the BOS token that the model's pipeline adds by itself: the model then sees
        two, which costs quality and raises no error. (A rendered chat template is such a text; pass
        ``add_special_tokens=False`` for it.)

        Args:
            text: The text. Special tokens written in it become those tokens.
            add_special_tokens: Whether the tokens that the model expects around a text (mostly BOS) are added.

        Raises:
            PromptError: The text is not a string, or holds half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise PromptError(f"text: expected a string, got {type(text).__name__}")
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # what the library says to a string that is not valid Unicode
            raise PromptError("text: holds half of a surrogate pair, which no encoding can carry") from error
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            warnings.warn(
                f"the text begins with {self.special_tokens['bos_token']!r}, which the tokenizer adds by itself: the "
                "model sees it twice; leave it out of the text, or pass add_special_tokens=False",
                UserWarning,
                stacklevel=2,
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn token ids into text. Bytes that are not UTF-8 show as U+FFFD.

        Args:
            ids: Token ids.
            skip_special_tokens: Whether special tokens are left out.

        Raises:
            PromptError: An id is not in the vocabulary.
        """
        text = self.backend.decode(self._checked(ids), skip_special_tokens=skip_special_tokens)
        for old, new in self.replacements:
            text = text.replace(old, new)
        return text

    def token_to_id(self, token: str) -> int | None:
        """Id of the token with exactly this text, or None."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token's text as the vocabulary spells it, or None."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tokenize: Literal[True] = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tokenize: Literal[False],
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int] | str:
        """Turn a conversation into the prompt that the model was trained on.

        Args:
            messages: Mappings with a role and a content, oldest first.
            tools: JSON schemas of functions that the model may call.
            documents: Mappings with a title and a text, for templates that quote them.
            add_generation_prompt: Whether the prompt ends where the model's answer begins; None means yes, unless
                ``continue_final_message``.
            continue_final_message: Whether the prompt ends inside the last message, for the model to go on with; a
                string names the field that it goes on with.
            tokenize: Whether to return ids rather than text.
            chat_template: Name of one of the model's templates, or a template to use in their place.
            **kwargs: Variables for the template. They win over the special tokens.

        Returns:
            Ids, without any special token that the template does not write itself; or the text.

        Raises:
            PromptError: There is no template, a message is malformed, or the template refuses or fails.
        """
        text = chat_templates.render(
            chat_templates.choose(self.chat_template, chat_template, with_tools=tools is not None),
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **kwargs},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _surround(self, with_bos: bool, with_eos: bool) -> None:
        from tokenizers.processors import TemplateProcessing

        eos = self._special_id("eos_token")
        before = (
            [(self.special_tokens["bos_token"], self.bos_token_id)]
            if with_bos and self.bos_token_id is not None
            else []
        )
        after = [(self.special_tokens["eos_token"], eos)] if with_eos and eos is not None else []
        self.backend.post_processor = TemplateProcessing(
            single=[*(token for token, _ in before), "$A", *(token for token, _ in after)],
            pair=None,
            special_tokens=list(dict.fromkeys([*before, *after])),
        )

    def _checked(self, ids: Sequence[int]) -> list[int]:
        try:
            checked = [operator.index(token_id) for token_id in ids]
        except TypeError as error:
            raise PromptError(f"ids: expected a list of token ids: {error}") from error
        size = self.vocab_size
        if checked and (min(checked) < 0 or max(checked) >= size):
            for i, token_id in enumerate(checked):
                # A vocabulary with gaps has ids beyond its size, so the size alone does not condemn one.
                if not 0 <= token_id < size and self.id_to_token(token_id) is None:
                    raise PromptError(f"ids[{i}]: {token_id} is not a token id; the vocabulary has {size:,} tokens")
        return checked
