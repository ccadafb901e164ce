"""What watches a run: hangs, ranks out of step, replicas that drift, numbers that go wrong."""
