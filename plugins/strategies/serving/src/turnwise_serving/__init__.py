"""What the backends of this repository that talk to a server share; a library without hooks."""
