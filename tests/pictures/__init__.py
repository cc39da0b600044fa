"""The pictures of README.md, which `make report` draws: a terminal, and a page of `ckpttool report`."""
