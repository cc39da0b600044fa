"""python -m ckpttool"""

from .cli import main

main()
