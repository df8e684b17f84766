"""A request body becomes engine requests: translation of APIs, chat template, sampling, tools and grammars."""
