"""Names of what can be wrong with a file, a value or an override before rules between keys are looked at.

A report names each problem's rule. The other names stand in `recipe/rules`; docs/configuration.md lists all of them.
"""

from __future__ import annotations

READING_RULES = {
    "file": "The recipe is there and is text in UTF-8.",
    "tab": "YAML is indented by spaces; a tab is invisible and means something else to each reader.",
    "yaml": "The file is YAML: maps with text keys, lists and scalars, no tags, no endless aliases or nesting.",
    "root": "A recipe is a map of sections.",
    "duplicate key": "A key stands once in a map; of two, one would be lost without a word.",
    "parent": "`defaults` names files that are there.",
    "cycle": "A recipe does not inherit from itself.",
    "_override_": "`_override_` is true or false, and true only where there is an inherited map to drop.",
    "override": "An override of the command line is in Hydra's grammar and names a key that can take it.",
    "interpolation": "An interpolation leads to a value, and arithmetic is exact.",
    "mandatory": "A value that is ??? has to be set by a child or on the command line.",
    "missing key": "A key without a default is there.",
    "unknown key": "A key is one of the schema: a misspelled one would leave the default in place.",
    "type": "A value has the type and range of its key.",
    "directory collision": "No two recipes that are checked together write to the same folder.",
}
