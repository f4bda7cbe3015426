"""One file per kind of plugin: the Protocol that an implementation fulfils, and the context that it is built with."""
