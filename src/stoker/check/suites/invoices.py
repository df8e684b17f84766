"""Invoices to JSON: English and Hungarian, six layouts, several currencies, every name and number made up."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random

from stoker.check.items import Item, tokens_of, user
from stoker.check.words import code, listed, name

NAME = "invoices"
MONTHS = {
    "en": listed("January February March April May June July August September October November December"),
    "hu": listed("január február március április május június július augusztus szeptember október november december"),
}
WORDS = {
    "en": {
        "invoice": "INVOICE",
        "number": "Invoice no.",
        "issued": "Issue date",
        "due": "Due date",
        "seller": "Seller",
        "tax": "VAT ID",
        "buyer": "Bill to",
        "order": "Your order",
        "delivered": "Delivery date",
        "bank": "Account",
        "item": "Description",
        "quantity": "Qty",
        "price": "Unit price",
        "amount": "Amount",
        "net": "Net total",
        "vat": "VAT",
        "total": "Total due",
    },
    "hu": {
        "invoice": "SZÁMLA",
        "number": "Számla sorszáma",
        "issued": "Kelt",
        "due": "Fizetési határidő",
        "seller": "Eladó",
        "tax": "Adószám",
        "buyer": "Vevő",
        "order": "Rendelésszám",
        "delivered": "Teljesítés",
        "bank": "Bankszámla",
        "item": "Megnevezés",
        "quantity": "Menny.",
        "price": "Egységár",
        "amount": "Érték",
        "net": "Nettó összesen",
        "vat": "ÁFA",
        "total": "Fizetendő",
    },
}
THINGS = {
    "en": listed(
        "hinge bracket,steel cable,door closer,desk lamp,filter cartridge,safety gloves,label roll,"
        "wall anchor,pressure gauge,ink ribbon,cable duct,storage crate,floor mat,spare key,work "
        "bench,hose clamp",
        ",",
    ),
    "hu": listed(
        "zsanér,acélsodrony,ajtócsukó,asztali lámpa,szűrőbetét,védőkesztyű,címketekercs,tipli,"
        "nyomásmérő,festékszalag,kábelcsatorna,tárolóláda,lábtörlő,pótkulcs,munkapad,tömlőbilincs",
        ",",
    ),
}
FORMS = {"en": ("Ltd", "LLP", "Inc.", "GmbH", "& Sons"), "hu": ("Kft.", "Bt.", "Zrt.", "Nyrt.", "és Társa Bt.")}
CURRENCIES = {"en": ("EUR", "USD", "GBP", "CHF", "PLN"), "hu": ("HUF", "HUF", "HUF", "EUR", "CHF")}
RATES = {"HUF": (27, 18, 5), "EUR": (19, 20, 21), "USD": (0, 8), "GBP": (20, 5), "CHF": (8,), "PLN": (23, 8)}
TASK = (
    "Read the invoice below and answer with one JSON object and nothing else. Keys: invoice_number, issue_date, "
    "due_date (dates as YYYY-MM-DD), seller, seller_tax_number, buyer, currency (three letters), items (a list "
    "of objects with "
    "description, quantity, unit_price, total), net, vat_rate (per cent), vat, total. Write amounts as JSON numbers "
    "without thousands separators.\n\n"
)


@dataclass(frozen=True)
class Invoice:
    language: str
    currency: str
    number: str
    issued: date
    due: date
    seller: str
    tax: str
    buyer: str
    order: str
    delivered: date
    bank: str
    lines: tuple[tuple[str, int, int], ...]  # description, pieces, price in the smallest unit
    rate: int

    @property
    def unit(self) -> int:
        return 1 if self.currency == "HUF" else 100

    @property
    def net(self) -> int:
        return sum(pieces * price for _, pieces, price in self.lines)

    @property
    def vat(self) -> int:
        return (self.net * self.rate + 50) // 100

    def value(self, amount: int) -> float | int:
        return amount if self.unit == 1 else amount / 100

    def fields(self) -> dict[str, object]:
        return {
            "invoice_number": self.number,
            "issue_date": self.issued.isoformat(),
            "due_date": self.due.isoformat(),
            "seller": self.seller,
            "seller_tax_number": self.tax,
            "buyer": self.buyer,
            "currency": self.currency,
            "items": [
                {
                    "description": thing,
                    "quantity": pieces,
                    "unit_price": self.value(price),
                    "total": self.value(pieces * price),
                }
                for thing, pieces, price in self.lines
            ],
            "net": self.value(self.net),
            "vat_rate": self.rate,
            "vat": self.value(self.vat),
            "total": self.value(self.net + self.vat),
        }


def items(seed: str, count: int) -> list[Item]:
    """Layouts, languages and lengths come in turns, so that every seed has the same mix."""
    found = []
    for place in range(count):
        rng = Random(f"{seed}/{NAME}/{place}")
        language, layout = ("en", "hu")[place % 2], LAYOUTS[place // 2 % len(LAYOUTS)]
        invoice = _invoice(rng, language, lines=1 + place // 12 % 4)
        expected = invoice.fields()
        tokens = tokens_of(json.dumps(expected, ensure_ascii=False))
        found.append(
            Item(
                id=f"{NAME}-{place}",
                suite=NAME,
                kind=f"{language}, {layout.__name__.strip('_').replace('_', ' ')}",
                messages=user(TASK + layout(invoice, rng)),
                checker="json_fields",
                expect=expected,
                max_tokens=2 * tokens + 64,
                answer_tokens=tokens,
            )
        )
    return found


def _invoice(rng: Random, language: str, lines: int) -> Invoice:
    currency = rng.choice(CURRENCIES[language])
    issued = date(rng.choice((2025, 2026, 2027)), rng.randint(1, 12), rng.randint(1, 28))
    things = rng.sample(THINGS[language], lines)
    dear = 20 if currency == "HUF" else 1
    return Invoice(
        language=language,
        currency=currency,
        number=code(rng, rng.choice(("LL-#####", "####/###", "LLL####-#", "2026-######"))),
        issued=issued,
        due=issued + timedelta(days=rng.choice((8, 14, 15, 30, 45))),
        seller=f"{name(rng)} {name(rng)} {rng.choice(FORMS[language])}",
        tax=code(rng, "########-#-##") if language == "hu" else code(rng, "LL#########"),
        buyer=f"{name(rng)} {rng.choice(FORMS[language])}",
        order=code(rng, "L######"),
        delivered=issued - timedelta(days=rng.randint(0, 6)),
        bank=code(rng, "########-########-########"),
        lines=tuple(
            (f"{thing} {code(rng, 'L##')}", rng.randint(1, 48), rng.randint(45, 24_000) * dear) for thing in things
        ),
        rate=rng.choice(RATES[currency]),
    )


def _amount(invoice: Invoice, amount: int, signed: bool = False) -> str:
    whole, rest = divmod(amount, invoice.unit)
    grouped = f"{whole:,}"
    if invoice.language == "hu":
        shown = grouped.replace(",", " ") + (f",{rest:02}" if invoice.unit == 100 else "")
        return f"{shown} {'Ft' if invoice.currency == 'HUF' else invoice.currency}" if signed else shown
    shown = grouped + (f".{rest:02}" if invoice.unit == 100 else "")
    return f"{invoice.currency} {shown}" if signed else shown


def _day(invoice: Invoice, day: date, written: bool) -> str:
    month = MONTHS[invoice.language][day.month - 1]
    if invoice.language == "hu":
        return f"{day.year}. {month} {day.day}." if written else f"{day:%Y.%m.%d}."
    return f"{day.day} {month} {day.year}" if written else f"{day:%Y-%m-%d}"


def _labelled(invoice: Invoice, rng: Random) -> str:
    w = WORDS[invoice.language]
    head = (
        f"{w['invoice']}\n{w['number']}: {invoice.number}\n{w['issued']}: {_day(invoice, invoice.issued, False)}\n"
        f"{w['due']}: {_day(invoice, invoice.due, False)}\n{w['order']}: {invoice.order}\n\n"
        f"{w['seller']}: {invoice.seller}\n{w['tax']}: {invoice.tax}\n{w['bank']}: {invoice.bank}\n"
        f"{w['buyer']}: {invoice.buyer}\n\n"
    )
    lines = "\n".join(
        f"{place}. {thing}, {pieces} x {_amount(invoice, price, True)} = {_amount(invoice, pieces * price, True)}"
        for place, (thing, pieces, price) in enumerate(invoice.lines, 1)
    )
    return head + lines + "\n\n" + _sums(invoice)


def _table(invoice: Invoice, rng: Random) -> str:
    w = WORDS[invoice.language]
    head = (
        f"| {w['seller']} | {w['buyer']} |\n|---|---|\n| {invoice.seller} | {invoice.buyer} |\n"
        f"| {w['tax']}: {invoice.tax} | {w['order']}: {invoice.order} |\n\n"
        f"{w['invoice']} {invoice.number} | {w['issued']} {_day(invoice, invoice.issued, False)} | "
        f"{w['due']} {_day(invoice, invoice.due, False)}\n\n"
        f"| {w['item']} | {w['quantity']} | {w['price']} ({invoice.currency}) | {w['amount']} ({invoice.currency}) |\n"
        "|---|---|---|---|\n"
    )
    return (
        head
        + "".join(
            f"| {thing} | {pieces} | {_amount(invoice, price)} | {_amount(invoice, pieces * price)} |\n"
            for thing, pieces, price in invoice.lines
        )
        + "\n"
        + _sums(invoice)
    )


def _columns(invoice: Invoice, rng: Random) -> str:
    w = WORDS[invoice.language]
    rows = [(w["item"], w["quantity"], w["price"], w["amount"])] + [
        (thing, str(pieces), _amount(invoice, price), _amount(invoice, pieces * price))
        for thing, pieces, price in invoice.lines
    ]
    wide = [max(len(row[place]) for row in rows) + 2 for place in range(4)]
    body = "\n".join(row[0].ljust(wide[0]) + "".join(row[k].rjust(wide[k]) for k in (1, 2, 3)) for row in rows)
    return (
        f"{invoice.seller:<44}{w['invoice']}\n{w['tax'] + ' ' + invoice.tax:<44}{invoice.number}\n"
        f"{w['bank'] + ' ' + invoice.bank:<44}{w['issued']} {_day(invoice, invoice.issued, True)}\n"
        f"{'':<44}{w['due']} {_day(invoice, invoice.due, True)}\n\n{w['buyer']}\n  {invoice.buyer}\n\n"
        f"{body}\n{'-' * sum(wide)}\n{_sums(invoice)}"
    )


def _letter(invoice: Invoice, rng: Random) -> str:
    if invoice.language == "hu":
        lines = "; ".join(
            f"{pieces} db {thing}, darabja {_amount(invoice, price, True)}, "
            f"összesen {_amount(invoice, pieces * price, True)}"
            for thing, pieces, price in invoice.lines
        )
        return (
            f"Tisztelt {invoice.buyer}!\n\nEzúton küldjük a(z) {invoice.number} sorszámú számlánkat a(z) "
            f"{invoice.order} számú rendelésükre. A számla kelte {_day(invoice, invoice.issued, True)}, a teljesítés "
            f"napja {_day(invoice, invoice.delivered, True)}. Tételek: {lines}. A nettó összeg "
            f"{_amount(invoice, invoice.net, True)}, erre {invoice.rate}% áfa, azaz "
            f"{_amount(invoice, invoice.vat, True)}"
            f" jön. Kérjük, hogy a fizetendő {_amount(invoice, invoice.net + invoice.vat, True)} összeget "
            f"{_day(invoice, invoice.due, True)} napjáig utalják át.\n\nÜdvözlettel:\n{invoice.seller}\n"
            f"Adószám: {invoice.tax}\n"
        )
    lines = "; ".join(
        f"{pieces} of {thing} at {_amount(invoice, price, True)} each, {_amount(invoice, pieces * price, True)}"
        for thing, pieces, price in invoice.lines
    )
    return (
        f"Dear {invoice.buyer},\n\nplease find our invoice {invoice.number} for your order {invoice.order}. It was "
        f"issued on {_day(invoice, invoice.issued, True)}; the goods were delivered on "
        f"{_day(invoice, invoice.delivered, True)}. We charge: {lines}. That makes "
        f"{_amount(invoice, invoice.net, True)}"
        f" net, to which {invoice.rate}% VAT adds {_amount(invoice, invoice.vat, True)}. Kindly pay "
        f"{_amount(invoice, invoice.net + invoice.vat, True)} by {_day(invoice, invoice.due, True)}.\n\nYours,\n"
        f"{invoice.seller}\nVAT ID {invoice.tax}\n"
    )


def _receipt(invoice: Invoice, rng: Random) -> str:
    w = WORDS[invoice.language]
    lines = "".join(
        f"{thing}\n   {pieces} x {_amount(invoice, price):>12} {_amount(invoice, pieces * price):>16}\n"
        for thing, pieces, price in invoice.lines
    )
    return (
        f"*** {invoice.seller} ***\n{w['tax']} {invoice.tax}\n{'=' * 36}\n{w['invoice']} #{invoice.number}\n"
        f"{_day(invoice, invoice.issued, False)}  ({w['due']}: {_day(invoice, invoice.due, False)})\n{'=' * 36}\n"
        f"{lines}{'=' * 36}\n{_sums(invoice)}{'=' * 36}\n{w['buyer']}: {invoice.buyer}\n{w['bank']} {invoice.bank}\n"
    )


def _scanned(invoice: Invoice, rng: Random) -> str:
    """Text as recognised from a scan: blocks out of order, ragged spaces."""
    w = WORDS[invoice.language]
    blocks = [
        f"{w['buyer']}   {invoice.buyer}\n{w['order']}  {invoice.order}",
        f"{w['seller']}  {invoice.seller}\n {w['tax']}   {invoice.tax}",
        f"{w['number']}   {invoice.number}\n{w['delivered']} {_day(invoice, invoice.delivered, False)}\n"
        f"{w['issued']}  {_day(invoice, invoice.issued, False)}   {w['due']}  {_day(invoice, invoice.due, False)}",
    ]
    rng.shuffle(blocks)
    lines = "\n".join(
        f"{thing}   {pieces}    {_amount(invoice, price)}    {_amount(invoice, pieces * price)}"
        for thing, pieces, price in invoice.lines
    )
    return "\n\n".join([*blocks, f"{w['item']}  {w['quantity']}  {w['price']}  {w['amount']}\n{lines}", _sums(invoice)])


def _sums(invoice: Invoice) -> str:
    w = WORDS[invoice.language]
    return (
        f"{w['net']}: {_amount(invoice, invoice.net, True)}\n"
        f"{w['vat']} {invoice.rate}%: {_amount(invoice, invoice.vat, True)}\n"
        f"{w['total']}: {_amount(invoice, invoice.net + invoice.vat, True)}\n"
    )


LAYOUTS: tuple[Callable[[Invoice, Random], str], ...] = (_labelled, _table, _columns, _letter, _receipt, _scanned)
