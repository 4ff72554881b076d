"""``python -m recipes.embedded``, from the root of the repository."""

from recipes.embedded.recipe import main

main()
