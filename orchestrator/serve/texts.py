"""The model's tokenizer, here. The head has its own; this one is opened when somebody needs it."""

import asyncio
from collections.abc import Iterable

from pptasks.modelinfo import Model
from pptasks.text import Text, open_text


class Texts:
    def __init__(self, model: Model):
        self._model, self._lock = model, asyncio.Lock()
        self._text: Text | None = None

    async def decode(self, ids: Iterable[int]) -> str:
        """Raises ModelError."""
        async with self._lock:
            if self._text is None:
                self._text = await asyncio.to_thread(self._open)
        return self._text.decode(list(ids))

    def _open(self) -> Text:
        self._model.source.fetch_text(lambda phase, done, total: None)
        return open_text(self._model)
