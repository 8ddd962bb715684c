"""Adapters to other libraries, each imported by name alone: importing ringattn imports none of them."""
