"""The contract tests, one file per kind. `turnwise test-plugin` runs them; each test asks for the fixture
`implementation`."""
