"""A task's prompt as tokens."""

from __future__ import annotations

from seedx.chat import ChatTemplate
from seedx.checks import ConfigError
from seedx.envs.text.task import Prompt
from seedx.tokenizer import Tokenizer


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> tuple[int, ...]:
    """The tokens that a completion of the prompt follows; they begin with one BOS if the tokenizer has one.

    Messages go through the chat template, up to where the assistant begins; a text stays as it is, for a chat model
    too.

    Args:
        prompt: Of a task.
        tokenizer: The model's.
        chat_template: The model's; None: it has none.

    Raises:
        ConfigError: the prompt has messages and the model no template, the template refuses them, or there is nothing
            to encode.
    """
    if not prompt.messages:
        tokens = tokenizer.encode(prompt.text)
    elif chat_template is None:
        raise ConfigError(
            "a prompt has messages, and the model has no chat template to make a text of them; use a chat model, or a "
            "task whose prompts are texts."
        )
    else:
        try:
            tokens = chat_template.encode(tokenizer, list(prompt.messages))
        except ValueError as error:
            raise ConfigError(f"a prompt cannot be given to this model: {error}") from error
    if not tokens:
        raise ConfigError("a prompt is empty, and the model has no BOS to begin with; give the prompt a text.")
    return tuple(tokens)
