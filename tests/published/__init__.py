"""Published models with trained weights, from files inside packages of the index: no code of these packages runs."""
