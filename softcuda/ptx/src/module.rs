//! A module's directives: what it declares, and where in the text.

use crate::{
    Cursor, Declaration, Declarations, Kind, Lexeme, PtxError, Result, Token, declarations,
};

/// The deepest nesting of braces.
pub const NESTING_MAX: usize = 256;

/// A PTX module. Its items are parsed as they are asked for.
#[derive(Clone, Debug)]
pub struct Module<'a> {
    pub version: (u32, u32),
    /// The version's number in the text.
    pub version_token: Token,
    pub items: Items<'a>,
}

/// What a module declares, in the order of the text. After an error there are no more.
#[derive(Clone, Debug)]
pub struct Items<'a> {
    at: Cursor<'a>,
    /// What is left of a directive with several variables.
    variables: Option<(Linkage, Declarations<'a>)>,
}

#[derive(Clone, Debug)]
pub enum Item<'a> {
    Function(Function<'a>),
    /// A variable in `.global`, `.const`, `.shared` or `.tex`.
    Variable(Linkage, Declaration<'a>),
    /// The directive `.alias name, of;`.
    Alias {
        name: &'a str,
        of: &'a str,
    },
    /// The words and commas of `.target`: `sm_90a, debug`.
    Target(&'a [Token]),
    /// The number of `.address_size`.
    AddressSize(Token),
}

/// `.visible`, `.extern`, `.weak` and `.common`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Linkage {
    /// Whether any linking directive is there.
    pub is_given: bool,
    pub is_extern: bool,
}

/// An `.entry` or a `.func`.
#[derive(Clone, Debug)]
pub struct Function<'a> {
    pub is_entry: bool,
    pub name: Token,
    /// Return values with their parentheses; `None` without any.
    pub results: Option<&'a [Token]>,
    /// Parameters with their parentheses; `None` without any.
    pub parameters: Option<&'a [Token]>,
    pub threads_max: Option<[u32; 3]>,
    pub threads: Option<[u32; 3]>,
    pub cluster: Option<[u32; 3]>,
    /// `.explicitcluster` or `.maxclusterrank`: a launch may form clusters.
    pub may_cluster: bool,
    /// `.blocksareclusters`: the launch counts clusters, not blocks.
    pub counts_clusters: bool,
    /// With its braces; `None` for a declaration.
    pub body: Option<&'a [Token]>,
}

/// Reads the head of a module; `tokens` are those of `source`.
///
/// # Errors
/// Text that is no module. [`Items`] has errors of its own, such as a directive that is not known.
pub fn parse<'a>(source: &'a str, tokens: &'a [Token]) -> Result<Module<'a>> {
    let mut at = Cursor::new(source, tokens);
    if at.take() != Lexeme::Dot(".version") {
        return Err(PtxError::new(1, "PTX must start with `.version`"));
    }
    let (Some(version_token), Some(version)) = (at.token(), version(&at)) else {
        return Err(at.unexpected("a version"));
    };
    at.skip();
    Ok(Module { version, version_token, items: Items { at, variables: None } })
}

fn version(at: &Cursor<'_>) -> Option<(u32, u32)> {
    let Lexeme::Number(text) = at.peek() else { return None };
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

impl<'a> Iterator for Items<'a> {
    type Item = Result<Item<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.item().transpose();
        if let Some(Err(_)) = next {
            self.at.finish();
            self.variables = None;
        }
        next
    }
}

impl<'a> Items<'a> {
    fn item(&mut self) -> Result<Option<Item<'a>>> {
        let mut linkage = Linkage::default();
        loop {
            if let Some((linkage, variables)) = &mut self.variables {
                if let Some(variable) = variables.next() {
                    return Ok(Some(Item::Variable(*linkage, variable?)));
                }
                self.variables = None;
            }
            let directive = self.at;
            match self.at.take() {
                Lexeme::End => return Ok(None),
                Lexeme::Dot(word @ (".visible" | ".extern" | ".weak" | ".common")) => {
                    linkage.is_given = true;
                    linkage.is_extern |= word == ".extern";
                    continue;
                }
                Lexeme::Dot(".entry") => return self.function(true).map(Some),
                Lexeme::Dot(".func") => return self.function(false).map(Some),
                Lexeme::Dot(".global" | ".const" | ".shared" | ".tex") => {
                    self.at = directive;
                    let statement = self.at.statement()?;
                    self.variables = Some((linkage, declarations(self.at.source(), statement)));
                }
                Lexeme::Dot(".target") => {
                    let from = self.at.position();
                    self.at.name()?;
                    while self.at.eat(b',') {
                        self.at.name()?;
                    }
                    return Ok(Some(Item::Target(self.at.since(from))));
                }
                Lexeme::Dot(".address_size") => {
                    let size = self.at.token();
                    self.at.integer()?;
                    return Ok(size.map(Item::AddressSize));
                }
                // `@@DWARF` is debug data of old compilers.
                Lexeme::Dot(".file" | ".loc") | Lexeme::Punct(b'@') => {
                    self.at = directive;
                    self.at.skip_line();
                }
                Lexeme::Dot(".section") => {
                    while !self.at.is_at_end() && !self.at.is(b'{') {
                        self.at.skip();
                    }
                    self.braces()?;
                }
                Lexeme::Dot(".pragma") => {
                    self.at.statement()?;
                }
                Lexeme::Dot(".alias") => {
                    let name = self.at.word()?;
                    self.at.expect(b',')?;
                    let of = self.at.word()?;
                    self.at.expect(b';')?;
                    return Ok(Some(Item::Alias { name, of }));
                }
                Lexeme::Punct(b';') => {}
                Lexeme::Dot(_) => return Err(directive.unexpected("a directive of a module")),
                _ => return Err(directive.unexpected("a directive")),
            }
            linkage = Linkage::default();
        }
    }

    fn function(&mut self, is_entry: bool) -> Result<Item<'a>> {
        // `.attribute(...)` and `.noreturn` may come before the results.
        while let (false, Lexeme::Dot(_)) = (is_entry, self.at.peek()) {
            self.at.skip();
            self.at.parenthesised()?;
        }
        let results = if is_entry { None } else { self.at.parenthesised()? };
        let mut function = Function {
            is_entry,
            name: self.at.name()?,
            results,
            parameters: self.at.parenthesised()?,
            threads_max: None,
            threads: None,
            cluster: None,
            may_cluster: false,
            counts_clusters: false,
            body: None,
        };
        while let Lexeme::Dot(word) = self.at.peek() {
            self.function_directive(&mut function, word)?;
        }
        if !self.at.eat(b';') {
            function.body = Some(self.braces()?);
        }
        Ok(Item::Function(function))
    }

    fn function_directive(&mut self, function: &mut Function<'a>, word: &str) -> Result<()> {
        let directive = self.at;
        self.at.skip();
        match word {
            ".maxntid" => function.threads_max = Some(self.triple()?),
            ".reqntid" => function.threads = Some(self.triple()?),
            ".reqnctapercluster" => function.cluster = Some(self.triple()?),
            ".explicitcluster" => function.may_cluster = true,
            ".maxclusterrank" => {
                function.may_cluster = true;
                self.at.integer32()?;
            }
            ".blocksareclusters" => function.counts_clusters = true,
            ".minnctapersm" | ".maxnctapersm" | ".maxnreg" => {
                self.triple()?;
            }
            ".noreturn" => {}
            ".pragma" => {
                while let Lexeme::Str(_) | Lexeme::Punct(b',') = self.at.peek() {
                    self.at.skip();
                }
                self.at.expect(b';')?;
            }
            _ if function.is_entry => return Err(directive.unexpected("a directive of an entry")),
            // `.abi_preserve 8`, `.unified (...)` and what may come.
            _ => {
                self.at.parenthesised()?;
                while let Lexeme::Number(_) | Lexeme::Punct(b',') = self.at.peek() {
                    self.at.skip();
                }
            }
        }
        Ok(())
    }

    /// One to three numbers, the rest 1: `.maxntid 32, 8`.
    fn triple(&mut self) -> Result<[u32; 3]> {
        let mut out = [1; 3];
        for (i, value) in out.iter_mut().enumerate() {
            if i > 0 && !self.at.eat(b',') {
                break;
            }
            *value = self.at.integer32()?;
        }
        Ok(out)
    }

    /// Braces with what is between them.
    fn braces(&mut self) -> Result<&'a [Token]> {
        let from = self.at.position();
        let open = self.at;
        let mut depth = 0usize;
        while let Some(token) = self.at.token() {
            match token.kind() {
                Kind::Punct(b'{') if depth == NESTING_MAX => {
                    return Err(self.at.error("braces are nested too deeply"));
                }
                Kind::Punct(b'{') => depth += 1,
                _ if depth == 0 => break,
                Kind::Punct(b'}') => depth -= 1,
                _ => {}
            }
            self.at.skip();
            if depth == 0 {
                return Ok(self.at.since(from));
            }
        }
        if depth == 0 {
            return Err(self.at.unexpected("`{`"));
        }
        Err(open.error("the brace is never closed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{inside, lex, parameters};

    const HEAD: &str = ".version 8.7\n.target sm_90a, debug\n.address_size 64\n";

    fn items<'a>(text: &'a str, tokens: &'a [Token]) -> Result<Vec<Item<'a>>> {
        parse(text, tokens)?.items.collect()
    }

    fn fails(text: &str) -> PtxError {
        let tokens = lex(text).unwrap();
        if let Ok(mut module) = parse(text, &tokens) {
            assert!(module.items.by_ref().any(|item| item.is_err()), "{text}");
            assert!(module.items.next().is_none(), "{text}");
        }
        items(text, &tokens).expect_err(text)
    }

    #[test]
    fn items_lie_where_the_text_has_them() {
        let text = format!(
            "{HEAD}.extern .shared .b8 dynamic[];\n.global .u32 a = 1, b;\n.file 1 \"x.cu\"\n@@DWARF {{\n\
             .section .debug {{ .b8 1 {{ }} }}\n.pragma \"x\";\n.alias f, g;\n\
             .func (.param .b32 r) .noreturn;\n"
        );
        assert_eq!(fails(&text).message, "expected a name, found `.noreturn`");
        let text = text
            .replace(") .noreturn;", ") g (.reg .u64 p) .abi_preserve 8, 9 .pragma \"y\"; ;")
            + ".visible .entry k(.param .u64 p, .param .b8 q[3]) .maxntid 32, 2 .reqntid 4\n\
               .reqnctapercluster 2 .maxclusterrank 8 .blocksareclusters\n{ { ret; } }";
        let tokens = lex(&text).unwrap();
        let module = parse(&text, &tokens).unwrap();
        assert_eq!(module.version, (8, 7));
        assert_eq!(module.version_token.text(&text), "8.7");
        let items: Vec<Item<'_>> = module.items.collect::<Result<_>>().unwrap();
        let [
            Item::Target([target, _, _]),
            Item::AddressSize(size),
            variables @ ..,
            Item::Alias { name: "f", of: "g" },
            g,
            k,
        ] = &items[..]
        else {
            panic!("{items:?}");
        };
        assert_eq!((target.text(&text), size.text(&text)), ("sm_90a", "64"));
        let variables = variables.iter().map(|item| match item {
            Item::Variable(linkage, of) => {
                (of.space, linkage.is_extern, of.name(), of.initialiser.is_some())
            }
            _ => panic!("{item:?}"),
        });
        assert_eq!(
            variables.collect::<Vec<_>>(),
            [
                (".shared", true, "dynamic", false),
                (".global", false, "a", true),
                (".global", false, "b", false),
            ]
        );
        let (Item::Function(g), Item::Function(k)) = (g, k) else { panic!("{g:?} {k:?}") };
        assert_eq!((g.is_entry, g.name.text(&text), g.body), (false, "g", None));
        let list = |list: Option<&[Token]>| -> Vec<(String, String)> {
            let all = parameters(&text, list.unwrap()).map(Result::unwrap);
            all.map(|p| (p.space.to_owned(), p.name().to_owned())).collect()
        };
        let named = |space: &str, name: &str| (space.to_owned(), name.to_owned());
        assert_eq!(list(g.results), [named(".param", "r")]);
        assert_eq!(list(g.parameters), [named(".reg", "p")]);
        assert_eq!(list(k.parameters), [named(".param", "p"), named(".param", "q")]);
        assert_eq!(
            (k.is_entry, k.threads_max, k.threads),
            (true, Some([32, 2, 1]), Some([4, 1, 1]))
        );
        assert_eq!((k.cluster, k.may_cluster, k.counts_clusters), (Some([2, 1, 1]), true, true));
        let body = k.body.unwrap();
        let (first, last) = (body[0].start as usize, body[body.len() - 1].end() as usize);
        assert_eq!(&text[first..last], "{ { ret; } }");
        assert_eq!(inside(body).len(), body.len() - 2);
    }

    #[test]
    fn what_is_no_module_is_an_error_at_its_line() {
        for (text, line) in
            [("", 1), ("hello", 1), (".version", 1), (".version x.y", 1), (".version 8", 1)]
        {
            assert_eq!(fails(text).line, line, "{text}");
        }
        for rest in [
            ".entry",
            ".entry k(",
            ".entry k( { ret; }",
            ".entry k() { ret;",
            ".entry k() ret;",
            ".entry k() {} }",
            ".entry k() .newdirective {}",
            ".entry k() .maxntid {}",
            ".entry k() .maxntid 1, 2, 3, 4 {}",
            ".entry k() .maxntid 4294967296 {}",
            ".newdirective 3;",
            ".version 8.0",
            ".local .u32 a;",
            ".global ;",
            ".global .u32 a = {",
            ".section .debug {",
            ".section .debug",
            ".alias f g;",
            ".target",
            ".address_size x",
            "ret;",
        ] {
            assert_eq!(fails(&format!("{HEAD}{rest}")).line, 4, "{rest}");
        }
    }

    #[test]
    fn nesting_is_limited() {
        let nested =
            |depth: usize| format!("{HEAD}.entry k() {}{}", "{".repeat(depth), "}".repeat(depth));
        let text = nested(NESTING_MAX);
        assert!(items(&text, &lex(&text).unwrap()).is_ok());
        assert_eq!(fails(&nested(NESTING_MAX + 1)).message, "braces are nested too deeply");
    }
}
