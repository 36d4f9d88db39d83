"""Tables in the report's Markdown."""


def markdown_table(rows: list[list[str]]) -> str:
    """Return the table; the first row is the heading."""
    rule = ["---", *("---:" for _ in rows[0][1:])]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]]
    )
