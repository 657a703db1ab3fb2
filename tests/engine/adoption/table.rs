//! The table of mistakes. Each row is a rule with one mistake, on values written by the application (a new rule), or by
//! an earlier definition of the rule (a changed one).

/// One mistake.
pub struct Mistake {
    pub what: &'static str,
    /// The YAML below `- name: r`, with the mistake.
    pub rule: &'static str,
    /// A part of the line that the report must point to.
    pub line: &'static str,
    /// A part of the suggestion.
    pub suggestion: &'static str,
}

/// The rules without their mistakes.
pub const COPY: &str = "
    copy:
      source: customers
      target: orders
      match: { customer: _id }
      set: { customerName: $firstName, customerCity: $address.city }
";
pub const COLLECT: &str = "
    collect:
      source: orders
      target: customers
      match: { _id: customer }
      into: orders
      element: { id: $_id, amount: $amount }
      sort: { _id: 1 }
";
pub const AGGREGATE: &str = "
    aggregate:
      source: orders
      target: customers
      match: { _id: customer }
      set: { total: { $sum: $amount } }
";

pub const COPIES: &[Mistake] = &[
    Mistake {
        what: "a typo in the source",
        rule: "
    copy:
      source: custmers
      target: orders
      match: { customer: _id }
      set: { customerName: $firstName, customerCity: $address.city }
",
        line: "source: custmers",
        suggestion: "did you mean `customers`?",
    },
    Mistake {
        what: "a database that does not exist",
        rule: "
    copy:
      source: no_such_database.customers
      target: orders
      match: { customer: _id }
      set: { customerName: $firstName, customerCity: $address.city }
",
        line: "source: no_such_database",
        suggestion: "name an existing database",
    },
    Mistake {
        what: "a typo in the target",
        rule: "
    copy:
      source: customers
      target: ordres
      match: { customer: _id }
      set: { customerName: $firstName, customerCity: $address.city }
",
        line: "target: ordres",
        suggestion: "did you mean `orders`?",
    },
    Mistake {
        what: "a field that no source has",
        rule: "
    copy:
      source: customers
      target: orders
      match: { customer: _id }
      set:
        customerName: $firstNam
        customerCity: $address.city
",
        line: "customerName: $firstNam",
        suggestion: "did you mean `firstName`?",
    },
    Mistake {
        what: "a nested field that no source has",
        rule: "
    copy:
      source: customers
      target: orders
      match: { customer: _id }
      set:
        customerName: $firstName
        customerCity: $address.town
",
        line: "customerCity: $address.town",
        suggestion: "did you mean `address.city`?",
    },
    Mistake {
        what: "a forgotten $",
        rule: "
    copy:
      source: customers
      target: orders
      match: { customer: _id }
      set:
        customerName: firstName
        customerCity: $address.city
",
        line: "customerName: firstName",
        suggestion: "did you mean `$firstName`?",
    },
    Mistake {
        what: "a forgotten $ inside an expression",
        rule: "
    copy:
      source: customers
      target: orders
      match: { customer: _id }
      set:
        customerName: { $concat: [firstName, '!'] }
        customerCity: $address.city
",
        line: "$concat: [firstName",
        suggestion: "did you mean `$firstName`?",
    },
    Mistake {
        what: "an array met without $[]",
        rule: "
    copy:
      source: customers
      target: orders
      match:
        readers: _id
      set: { customerName: $firstName, customerCity: $address.city }
",
        line: "readers: _id",
        suggestion: "did you mean `readers.$[]`?",
    },
    Mistake {
        what: "an array written to without $[]",
        rule: "
    copy:
      source: customers
      target: orders
      match:
        lines.buyer: _id
      set: { lines.buyerName: $firstName, customerName: $firstName }
",
        line: "lines.buyer: _id",
        suggestion: "did you mean `lines.$[].buyer`?",
    },
    Mistake {
        what: "a reversed match",
        rule: "
    copy:
      source: customers
      target: orders
      match:
        _id: customer
      set: { customerName: $firstName, customerCity: $address.city }
",
        line: "_id: customer",
        suggestion: "did you mean `customer: _id`?",
    },
    Mistake {
        what: "references of a type that cannot resolve",
        rule: "
    copy:
      source: customers
      target: orders
      match:
        customerCode: _id
      set: { customerName: $firstName, customerCity: $address.city }
",
        line: "customerCode: _id",
        suggestion: "store both with one type",
    },
    Mistake {
        what: "a reference that no target has",
        rule: "
    copy:
      source: customers
      target: orders
      match:
        custome: _id
      set: { customerName: $firstName, customerCity: $address.city }
",
        line: "custome: _id",
        suggestion: "did you mean `customer`?",
    },
    Mistake {
        what: "typographic quotation marks",
        rule: "
    copy:
      source: “customers”
      target: orders
      match: { customer: _id }
      set: { customerName: $firstName, customerCity: $address.city }
",
        line: "source: “customers”",
        suggestion: "did you mean `customers`?",
    },
    Mistake {
        what: "a filter that leaves out everything",
        rule: "
    copy:
      source: { collection: customers, where: { activ: true } }
      target: orders
      match: { customer: _id }
      set: { customerName: $firstName, customerCity: $address.city }
",
        line: "activ: true",
        suggestion: "did you mean `active`?",
    },
];

pub const COLLECTS: &[Mistake] = &[
    Mistake {
        what: "a typo in the source",
        rule: "
    collect:
      source: ordrs
      target: customers
      match: { _id: customer }
      into: orders
      element: { id: $_id, amount: $amount }
",
        line: "source: ordrs",
        suggestion: "did you mean `orders`?",
    },
    Mistake {
        what: "a typo in the target",
        rule: "
    collect:
      source: orders
      target: custmers
      match: { _id: customer }
      into: orders
      element: { id: $_id, amount: $amount }
",
        line: "target: custmers",
        suggestion: "did you mean `customers`?",
    },
    Mistake {
        what: "a field that no source has",
        rule: "
    collect:
      source: orders
      target: customers
      match: { _id: customer }
      into: orders
      element: { id: $_id, amount: $amuont }
",
        line: "amount: $amuont",
        suggestion: "did you mean `amount`?",
    },
    Mistake {
        what: "a forgotten $",
        rule: "
    collect:
      source: orders
      target: customers
      match: { _id: customer }
      into: orders
      element: { id: $_id, amount: amount }
",
        line: "amount: amount",
        suggestion: "did you mean `$amount`?",
    },
    Mistake {
        what: "a reversed match",
        rule: "
    collect:
      source: orders
      target: customers
      match:
        customer: _id
      into: orders
      element: { id: $_id, amount: $amount }
",
        line: "customer: _id",
        suggestion: "did you mean `_id: customer`?",
    },
    Mistake {
        what: "an array met without $[]",
        rule: "
    collect:
      source: orders
      target: customers
      match:
        _id: readers
      into: orders
      element: { id: $_id, amount: $amount }
",
        line: "_id: readers",
        suggestion: "did you mean `readers.$[]`?",
    },
    Mistake {
        what: "references of a type that cannot resolve",
        rule: "
    collect:
      source: orders
      target: customers
      match:
        code: customer
      into: orders
      element: { id: $_id, amount: $amount }
",
        line: "code: customer",
        suggestion: "store both with one type",
    },
    Mistake {
        what: "a sort by a field that no source has",
        rule: "
    collect:
      source: orders
      target: customers
      match: { _id: customer }
      into: orders
      element: { id: $_id, amount: $amount, at: $placed }
      sort:
        palced: -1
",
        line: "palced: -1",
        suggestion: "did you mean `placed`?",
    },
    Mistake {
        what: "typographic quotation marks",
        rule: "
    collect:
      source: orders
      target: customers
      match: { _id: customer }
      into: orders
      element: “$_id”
",
        line: "element: “$_id”",
        suggestion: "did you mean `$_id`?",
    },
];

pub const AGGREGATES: &[Mistake] = &[
    Mistake {
        what: "a typo in the source",
        rule: "
    aggregate:
      source: ordrs
      target: customers
      match: { _id: customer }
      set: { total: { $sum: $amount } }
",
        line: "source: ordrs",
        suggestion: "did you mean `orders`?",
    },
    Mistake {
        what: "a field that no source has",
        rule: "
    aggregate:
      source: orders
      target: customers
      match: { _id: customer }
      set: { total: { $sum: $amuont } }
",
        line: "$sum: $amuont",
        suggestion: "did you mean `amount`?",
    },
    Mistake {
        what: "a forgotten $",
        rule: "
    aggregate:
      source: orders
      target: customers
      match: { _id: customer }
      set: { total: { $sum: amount } }
",
        line: "$sum: amount",
        suggestion: "did you mean `$amount`?",
    },
    Mistake {
        what: "a reversed match",
        rule: "
    aggregate:
      source: orders
      target: customers
      match:
        customer: _id
      set: { total: { $sum: $amount } }
",
        line: "customer: _id",
        suggestion: "did you mean `_id: customer`?",
    },
    Mistake {
        what: "an array met without $[]",
        rule: "
    aggregate:
      source: orders
      target: customers
      match:
        _id: readers
      set: { total: { $sum: $amount } }
",
        line: "_id: readers",
        suggestion: "did you mean `readers.$[]`?",
    },
    Mistake {
        what: "references of a type that cannot resolve",
        rule: "
    aggregate:
      source: orders
      target: customers
      match:
        code: customer
      set: { total: { $sum: $amount } }
",
        line: "code: customer",
        suggestion: "store both with one type",
    },
    Mistake {
        what: "a filter that leaves out everything",
        rule: "
    aggregate:
      source: { collection: orders, where: { stauts: open } }
      target: customers
      match: { _id: customer }
      set: { total: { $sum: $amount } }
",
        line: "stauts: open",
        suggestion: "did you mean `status`?",
    },
    Mistake {
        what: "a database that does not exist",
        rule: "
    aggregate:
      source: no_such_database.orders
      target: customers
      match: { _id: customer }
      set: { total: { $sum: $amount } }
",
        line: "source: no_such_database",
        suggestion: "name an existing database",
    },
];
