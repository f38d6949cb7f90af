"""The package's own code location, with workers that take no vLLM."""

from chain_home import stand_in

from tensorize_assets.definitions import build_defs, catalog_file, home

defs = build_defs(catalog_file(home()), home(), launcher=stand_in())
