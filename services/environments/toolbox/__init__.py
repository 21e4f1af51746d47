"""The bundled environment: a left-to-right calculator whose tools have names that the agent must find out."""
