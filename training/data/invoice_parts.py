"""The parts invoices are composed of: labels by language, JSON keys, line and table styles, number and date formats.

Every list has a training half and a held-out half; names in HELD_* never appear in a training document.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.data import words

Labels = dict[str, list[str]]

# field -> labels. The order of fields is the order in which JSON keys are listed.
LABELS: dict[str, Labels] = {
    "en": {
        "number": ["Invoice number", "Invoice No.", "Invoice #", "Document no."],
        "date": ["Date", "Invoice date", "Issued", "Date of issue"],
        "due": ["Due date", "Payment due", "Due"],
        "vendor": ["Seller", "Vendor", "From", "Supplier"],
        "customer": ["Customer", "Bill to", "Buyer", "Client"],
        "address": ["Address", "Billing address", "Customer address"],
        "tax_id": ["VAT ID", "Tax number", "VAT no."],
        "order": ["Order number", "PO number", "Your order"],
        "net": ["Subtotal", "Net amount", "Net"],
        "tax": ["VAT", "Tax", "Sales tax"],
        "total": ["Total", "Amount due", "Grand total", "Total due"],
    },
    "de": {
        "number": ["Rechnungsnummer", "Rechnung Nr.", "Rechnungs-Nr."],
        "date": ["Datum", "Rechnungsdatum", "Ausgestellt am"],
        "due": ["Fällig am", "Zahlbar bis"],
        "vendor": ["Verkäufer", "Lieferant", "Von"],
        "customer": ["Kunde", "Käufer", "Rechnung an"],
        "address": ["Anschrift", "Adresse"],
        "tax_id": ["USt-IdNr.", "Steuernummer"],
        "order": ["Bestellnummer", "Auftrag Nr."],
        "net": ["Netto", "Zwischensumme"],
        "tax": ["MwSt.", "USt."],
        "total": ["Gesamt", "Gesamtbetrag", "Summe"],
    },
    "hu": {
        "number": ["Számlaszám", "Számla sorszáma", "Sorszám"],
        "date": ["Kelt", "Számla kelte", "Dátum"],
        "due": ["Fizetési határidő", "Esedékesség"],
        "vendor": ["Eladó", "Szállító", "Kibocsátó"],
        "customer": ["Vevő", "Megrendelő", "Ügyfél"],
        "address": ["Cím", "Vevő címe"],
        "tax_id": ["Adószám", "Vevő adószáma"],
        "order": ["Rendelésszám", "Megrendelés száma"],
        "net": ["Nettó", "Nettó összeg"],
        "tax": ["ÁFA", "Áfa összege"],
        "total": ["Összesen", "Fizetendő", "Bruttó összeg"],
    },
    "fr": {
        "number": ["Numéro de facture", "Facture n°"],
        "date": ["Date de facture", "Émise le"],
        "due": ["Échéance", "À payer avant"],
        "vendor": ["Vendeur", "Fournisseur"],
        "customer": ["Client", "Acheteur"],
        "address": ["Adresse", "Adresse du client"],
        "tax_id": ["N° TVA", "Identifiant TVA"],
        "order": ["Commande n°", "Bon de commande"],
        "net": ["Total HT", "Montant net"],
        "tax": ["TVA", "Montant TVA"],
        "total": ["Total TTC", "Net à payer"],
    },
}
HELD_LABELS: dict[str, Labels] = {
    "en": {
        "number": ["Statement ref", "Bill number"],
        "date": ["Billed on", "Dated"],
        "due": ["Pay by", "Settle before"],
        "vendor": ["Merchant", "Provided by"],
        "customer": ["Purchaser", "Account holder"],
        "address": ["Domicile", "Postal address"],
        "tax_id": ["Fiscal code", "Tax registration"],
        "order": ["Requisition", "Reference of order"],
        "net": ["Before tax", "Goods value"],
        "tax": ["Duty", "Levy"],
        "total": ["Balance payable", "Sum to pay"],
    },
    "hu": {
        "number": ["Bizonylat száma", "Bizonylatszám"],
        "date": ["Kiállítás napja", "Kiállítva"],
        "due": ["Fizetendő eddig", "Teljesítési határnap"],
        "vendor": ["Értékesítő", "Kiállító"],
        "customer": ["Vásárló", "Címzett"],
        "address": ["Székhely", "Lakcím"],
        "tax_id": ["Adóazonosító", "Közösségi adószám"],
        "order": ["Igénylés száma", "Hivatkozás"],
        "net": ["Adó nélkül", "Alapösszeg"],
        "tax": ["Forgalmi adó", "Adótartalom"],
        "total": ["Végösszeg", "Mindösszesen"],
    },
}
KEYS: Labels = {
    "number": ["invoice_number", "invoice_no", "invoiceNumber", "number", "id"],
    "date": ["date", "invoice_date", "issued", "issueDate"],
    "due": ["due_date", "dueDate", "payment_due", "due"],
    "vendor": ["vendor", "seller", "supplier", "vendorName", "vendor_name"],
    "customer": ["customer", "buyer", "client", "customerName", "bill_to"],
    "address": ["address", "customer_address", "billingAddress"],
    "tax_id": ["tax_id", "vat_id", "vatNumber", "tax_number"],
    "order": ["order_number", "po_number", "orderNumber", "order"],
    "currency": ["currency", "currency_code", "ccy"],
    "net": ["net", "subtotal", "net_amount", "netAmount"],
    "tax": ["tax", "vat", "tax_amount", "vatAmount"],
    "total": ["total", "total_amount", "totalDue", "amount_due"],
    "items": ["items", "lines", "line_items", "positions"],
    "description": ["description", "name", "product", "item"],
    "quantity": ["quantity", "qty", "count"],
    "price": ["unit_price", "price", "unitPrice"],
    "amount": ["amount", "line_total", "lineTotal"],
}
HELD_KEYS: Labels = {
    "number": ["bill_ref", "document_id"],
    "date": ["billed_on", "creation_date"],
    "due": ["pay_before", "deadline"],
    "vendor": ["merchant", "issuer"],
    "customer": ["purchaser", "recipient"],
    "address": ["domicile", "postal_address"],
    "tax_id": ["fiscal_code", "vat_registration"],
    "order": ["requisition", "purchase_reference"],
    "currency": ["money_unit", "denomination"],
    "net": ["before_tax", "base_amount"],
    "tax": ["levy", "duty_amount"],
    "total": ["balance", "sum_payable"],
    "items": ["goods", "entries"],
    "description": ["article", "label"],
    "quantity": ["pieces", "units"],
    "price": ["each", "rate"],
    "amount": ["value", "subtotal_of_line"],
}
HEADINGS = {
    "en": ["INVOICE", "Invoice", "TAX INVOICE", "Sales invoice"],
    "de": ["RECHNUNG", "Rechnung"],
    "hu": ["SZÁMLA", "Számla", "ELEKTRONIKUS SZÁMLA"],
    "fr": ["FACTURE", "Facture"],
}
HELD_HEADINGS = {"en": ["BILLING STATEMENT", "Bill of sale"], "hu": ["BIZONYLAT", "Fizetési bizonylat"]}

LineStyle = Callable[[str, str], str]
LINES: dict[str, LineStyle] = {
    "colon": lambda label, value: f"{label}: {value}",
    "dots": lambda label, value: f"{label} {'.' * max(3, 28 - len(label))} {value}",
    "equals": lambda label, value: f"{label} = {value}",
    "below": lambda label, value: f"{label}\n  {value}",
    "pipe": lambda label, value: f"| {label} | {value} |",
    "dash": lambda label, value: f"- {label} - {value}",
    "upper": lambda label, value: f"{label.upper()}: {value}",
    "padded": lambda label, value: f"{label:<24}{value}",
}
HELD_LINES: dict[str, LineStyle] = {
    "bracket": lambda label, value: f"[{label}] {value}",
    "arrow": lambda label, value: f"{label} >> {value}",
    "star": lambda label, value: f"* {label} *\n{value}",
}

RowStyle = Callable[[int, str, str, str, str], str]  # place from 1, description, quantity, price, amount
ROWS: dict[str, RowStyle] = {
    "pipe": lambda i, d, q, p, a: f"| {d} | {q} | {p} | {a} |",
    "times": lambda i, d, q, p, a: f"{q} x {d} @ {p} = {a}",
    "semicolon": lambda i, d, q, p, a: f"{d};{q};{p};{a}",
    "numbered": lambda i, d, q, p, a: f"{i}. {d}, {q} pcs, {p} each, {a}",
    "columns": lambda i, d, q, p, a: f"{d:<22}{q:>4}{p:>12}{a:>12}",
    "slash": lambda i, d, q, p, a: f"{i} / {d} / {q} / {p} / {a}",
}
HELD_ROWS: dict[str, RowStyle] = {
    "brace": lambda i, d, q, p, a: f"{{{d}}} {q} ({p}) -> {a}",
    "tagged": lambda i, d, q, p, a: f"#{i} {d} :: qty {q} :: {p} :: {a}",
}

# text of an amount given in cents
MONEY: dict[str, Callable[[int], str]] = {
    "point": lambda c: f"{c // 100}.{c % 100:02d}",
    "comma_thousands": lambda c: f"{c // 100:,}.{c % 100:02d}",
    "continental": lambda c: f"{c // 100:,}".replace(",", ".") + f",{c % 100:02d}",
    "spaced": lambda c: f"{c // 100:,}".replace(",", " ") + f",{c % 100:02d}",
}
CURRENCIES = {
    "EUR": ["EUR", "€"],
    "USD": ["USD", "$"],
    "GBP": ["GBP", "£"],
    "HUF": ["HUF", "Ft"],
    "CHF": ["CHF"],
    "PLN": ["PLN", "zł"],
    "CZK": ["CZK", "Kč"],
    "SEK": ["SEK"],
}
DATES: dict[str, Callable[[int, int, int], str]] = {
    "iso": lambda y, m, d: f"{y}-{m:02d}-{d:02d}",
    "dotted": lambda y, m, d: f"{d:02d}.{m:02d}.{y}",
    "slashes": lambda y, m, d: f"{d:02d}/{m:02d}/{y}",
    "words": lambda y, m, d: f"{d} {words.MONTHS[m - 1]} {y}",
    "american": lambda y, m, d: f"{words.MONTHS[m - 1]} {d}, {y}",
    "hungarian": lambda y, m, d: f"{y}. {m:02d}. {d:02d}.",
    "hungarian_words": lambda y, m, d: f"{y}. {words.MONTHS_HU[m - 1]} {d}.",
}


@dataclass(frozen=True)
class Layout:
    """How an invoice looks. Made from its name alone."""

    name: str
    language: str
    heading: str
    labels: dict[str, str]
    fields: tuple[str, ...]  # header fields, in the order shown
    line: LineStyle
    row: RowStyle
    money: str
    date: str
    symbol_first: bool


def layout(name: str, held_out: bool) -> Layout:
    rng = words.rng_for("layout", name)
    by_language, headings = (HELD_LABELS, HELD_HEADINGS) if held_out else (LABELS, HEADINGS)
    language = rng.choice(sorted(by_language))
    labels = {field: rng.choice(options) for field, options in by_language[language].items()}
    optional = [f for f in ("due", "address", "tax_id", "order", "customer") if rng.random() < 0.5]
    fields = ["number", "date", "vendor", *optional]
    rng.shuffle(fields)
    return Layout(
        name=name,
        language=language,
        heading=rng.choice(headings[language]),
        labels=labels,
        fields=tuple(fields),
        line=pick(rng, HELD_LINES if held_out else LINES),
        row=pick(rng, HELD_ROWS if held_out else ROWS),
        money=rng.choice(sorted(MONEY)),
        date=rng.choice(sorted(DATES)),
        symbol_first=rng.random() < 0.4,
    )


Style = LineStyle | RowStyle


def pick(rng: random.Random, styles: dict) -> Callable[..., str]:
    """A style by name, so that the order of the dict's making does not matter."""
    return styles[rng.choice(sorted(styles))]
