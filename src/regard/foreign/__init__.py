"""What we know of other libraries' attention modules, recognised without importing the libraries.

`recognise` says how a module computes its attention, as a `Spec`; `project` and `merge` follow
that description with the module's own layers. Letters: b batch, c channels, n tokens, g heads, d
width of a head.
"""

from regard.foreign.follow import is_map, layer_at, merge, project
from regard.foreign.recognise import recognise
from regard.foreign.spec import Left, Spec

__all__ = ["Left", "Spec", "is_map", "layer_at", "merge", "project", "recognise"]
