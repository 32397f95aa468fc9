"""The base of every recipe section: strict keys, immutable, a docstring under each field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One recipe section. Unknown keys are errors; docstrings become descriptions in the docs."""

    model_config = ConfigDict(
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        strict=True,
    )
