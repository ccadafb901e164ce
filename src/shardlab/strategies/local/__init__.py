"""Workers that train apart and exchange what they learned now and then."""
