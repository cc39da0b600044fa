"""python -m ckpttool"""

from .core.cli import main

main()
