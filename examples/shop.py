"""Tools over a SQLite database: a search, a number, an order that changes it, and errors that the model can mend.

python examples/shop.py "Which articles are low?" [--model FOLDER_OR_HUB_ID] [--database shop.sqlite]

The embedded m3-nano was trained to draw: it runs this, and its calls are well-formed, but they mean little. Name a
larger checkpoint for answers.
"""

import argparse
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio

import m3agent as m3

ARTICLES = [
    ("A-100", "oak shelf", "north", 3, 10),
    ("A-100", "oak shelf", "south", 14, 10),
    ("B-200", "desk lamp", "north", 25, 20),
    ("C-300", "brass hook", "south", 40, 100),
]


@dataclass
class Article:
    sku: str
    name: str
    warehouse: str
    stock: int
    minimum: int


class Shop:
    """Each call opens the file anew: sync tools run in threads, and a SQLite connection belongs to one."""

    def __init__(self, database: Path) -> None:
        self.database = database

    def open(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(self.database, isolation_level=None))

    def find(self, words: str = "", low_only: bool = False) -> list[Article]:
        """Articles by name or number, with what is in stock.

        Args:
            words: part of a name or number; empty finds all
            low_only: only articles below their minimum
        """
        query = "SELECT sku, name, warehouse, stock, minimum FROM articles WHERE (name LIKE ? OR sku LIKE ?)"
        if low_only:
            query += " AND stock < minimum"
        with self.open() as database:
            return [Article(*row) for row in database.execute(query, [f"%{words}%"] * 2)]

    def order(self, sku: str, count: int, warehouse: Literal["north", "south"] = "north") -> str:
        """Order more of an article into a warehouse.

        Args:
            sku: the article's number
            count: how many
        """
        if not 1 <= count <= 1000:
            raise m3.ToolError(f"count is {count}; one order takes 1 to 1000")
        with self.open() as database:
            known = database.execute("SELECT 1 FROM articles WHERE sku = ? AND warehouse = ?", (sku, warehouse))
            if known.fetchone() is None:
                raise m3.ToolError(f"warehouse {warehouse} has no article {sku!r}; use find to see its number")
            database.execute("INSERT INTO orders (sku, warehouse, count) VALUES (?, ?, ?)", (sku, warehouse, count))
        return f"ordered {count} of {sku} into {warehouse}"


def make_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE articles (sku, name, warehouse, stock INTEGER, minimum INTEGER)")
        database.execute("CREATE TABLE orders (sku, warehouse, count INTEGER)")
        database.executemany("INSERT INTO articles VALUES (?, ?, ?, ?, ?)", ARTICLES)


async def ask(runtime: m3.Runtime, shop: Shop, question: str) -> m3.Reply:
    """One question; prints each call and its result as they happen."""
    agent = m3.Agent(
        runtime,
        instructions="You keep the stock of a shop. Look things up before you answer; order only what was asked for.",
        tools=[m3.tool(shop.find), m3.tool(shop.order)],
        max_turns=8,
    )
    async with agent.session() as session, session.stream(question, max_tokens=2000) as events:
        async for event in events:
            match event:
                case m3.CallFinished(call):
                    print(f"→ {call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})")
                case m3.ToolResultEvent(result):
                    print(f"← {result.text}")
                case _:
                    pass
        return events.reply


async def main(question: str, model: str | None, database: Path) -> None:
    if not database.exists():
        make_database(database)
    async with m3.Runtime.open(model) as runtime:
        reply = await ask(runtime, Shop(database), question)
    print(reply.text)
    print(f"[{reply.stop}; {reply.usage}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="Which articles are low? Order what is missing.")
    parser.add_argument("--model")
    parser.add_argument("--database", type=Path, default=Path("shop.sqlite"))
    options = parser.parse_args()
    anyio.run(main, options.question, options.model, options.database)
