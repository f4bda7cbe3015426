"""For tests: a small deterministic fake of every kind, and the conformance kit behind `turnwise test-plugin`."""
