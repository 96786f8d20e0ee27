//! A module's directives: what it declares, and where in the text.

use crate::declare::{Declaration, declarations};
use crate::{Cursor, Kind, Lexeme, PtxError, Result, Token};

/// The deepest nesting of braces.
pub const NESTING_MAX: usize = 256;

/// A PTX module's directives, in the order of the text.
#[derive(Clone, Debug)]
pub struct Module<'a> {
    pub source: &'a str,
    pub version: (u32, u32),
    /// The version's number in the text.
    pub version_token: Token,
    /// The words of `.target`: `sm_90a`, `debug`.
    pub targets: Vec<&'a str>,
    /// The number of `.address_size`.
    pub address_size: Option<Token>,
    pub items: Vec<Item<'a>>,
}

#[derive(Clone, Debug)]
pub enum Item<'a> {
    Function(Function<'a>),
    Variable {
        /// `.global`, `.const`, `.shared` or `.tex`.
        space: &'a str,
        linkage: Linkage,
        declaration: Declaration<'a>,
    },
    /// `.alias name, of;`
    Alias {
        name: &'a str,
        of: &'a str,
    },
}

/// `.visible`, `.extern`, `.weak` and `.common`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Linkage {
    /// One of them is there.
    pub is_given: bool,
    pub is_extern: bool,
}

/// An `.entry` or a `.func`, with its declarations' directives.
#[derive(Clone, Debug)]
pub struct Function<'a> {
    pub is_entry: bool,
    pub name: Token,
    /// With its parentheses.
    pub results: Option<&'a [Token]>,
    /// With its parentheses.
    pub parameters: Option<&'a [Token]>,
    /// `.maxntid`
    pub threads_max: Option<[u32; 3]>,
    /// `.reqntid`
    pub threads: Option<[u32; 3]>,
    /// `.reqnctapercluster`
    pub cluster: Option<[u32; 3]>,
    /// `.explicitcluster` or `.maxclusterrank`: a launch may form clusters.
    pub may_cluster: bool,
    /// `.blocksareclusters`: the launch counts clusters, not blocks.
    pub counts_clusters: bool,
    /// With its braces; `None` for a declaration.
    pub body: Option<&'a [Token]>,
}

/// Reads a module; `tokens` are those of `source`.
///
/// # Errors
/// Text that is no module, or has a directive that is not known.
pub fn parse<'a>(source: &'a str, tokens: &'a [Token]) -> Result<Module<'a>> {
    let mut at = Cursor::new(source, tokens);
    if at.take() != Lexeme::Dot(".version") {
        return Err(PtxError::new(1, "PTX must start with `.version`"));
    }
    let version = version(&at).ok_or_else(|| at.unexpected("a version"))?;
    let version_token = at.token().ok_or_else(|| at.unexpected("a version"))?;
    at.skip();
    let (targets, items) = (Vec::new(), Vec::new());
    let module = Module { source, version, version_token, targets, address_size: None, items };
    let mut parser = Parser { at, module };
    parser.directives()?;
    Ok(parser.module)
}

fn version(at: &Cursor<'_>) -> Option<(u32, u32)> {
    let Lexeme::Number(text) = at.peek() else { return None };
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

struct Parser<'a> {
    at: Cursor<'a>,
    module: Module<'a>,
}

impl<'a> Parser<'a> {
    fn directives(&mut self) -> Result<()> {
        let mut linkage = Linkage::default();
        while !self.at.is_at_end() {
            let directive = self.at;
            match self.at.take() {
                Lexeme::Dot(word @ (".visible" | ".extern" | ".weak" | ".common")) => {
                    linkage.is_given = true;
                    linkage.is_extern |= word == ".extern";
                    continue;
                }
                Lexeme::Dot(".entry") => self.function(true)?,
                Lexeme::Dot(".func") => self.function(false)?,
                Lexeme::Dot(space @ (".global" | ".const" | ".shared" | ".tex")) => {
                    self.at = directive;
                    let all = declarations(self.module.source, self.at.statement()?)?;
                    let variable = |declaration| Item::Variable { space, linkage, declaration };
                    self.module.items.extend(all.into_iter().map(variable));
                }
                Lexeme::Dot(".target") => {
                    self.module.targets.push(self.at.word()?);
                    while self.at.eat(b',') {
                        self.module.targets.push(self.at.word()?);
                    }
                }
                Lexeme::Dot(".address_size") => {
                    self.module.address_size = self.at.token();
                    self.at.integer()?;
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
                    self.module.items.push(Item::Alias { name, of });
                }
                Lexeme::Punct(b';') => {}
                Lexeme::Dot(_) => return Err(directive.unexpected("a directive of a module")),
                _ => return Err(directive.unexpected("a directive")),
            }
            linkage = Linkage::default();
        }
        Ok(())
    }

    fn function(&mut self, is_entry: bool) -> Result<()> {
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
        self.module.items.push(Item::Function(function));
        Ok(())
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

    fn fails(text: &str) -> PtxError {
        let tokens = lex(text).unwrap();
        parse(text, &tokens).map(|_| ()).expect_err(text)
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
        assert_eq!(module.targets, ["sm_90a", "debug"]);
        assert_eq!(module.address_size.map(|size| size.text(&text)), Some("64"));
        let [dynamic, a, b, Item::Alias { name: "f", of: "g" }, g, k] = &module.items[..] else {
            panic!("{:?}", module.items);
        };
        for (item, wanted) in [
            (dynamic, (".shared", true, "dynamic", false)),
            (a, (".global", false, "a", true)),
            (b, (".global", false, "b", false)),
        ] {
            let Item::Variable { space, linkage, declaration } = item else { panic!("{item:?}") };
            let has_value = declaration.initialiser.is_some();
            assert_eq!((*space, linkage.is_extern, declaration.name(), has_value), wanted);
        }
        let (Item::Function(g), Item::Function(k)) = (g, k) else { panic!("{g:?} {k:?}") };
        assert_eq!((g.is_entry, g.name.text(&text), g.body), (false, "g", None));
        let list = |list: Option<&[Token]>| -> Vec<(String, String)> {
            let all = parameters(&text, list.unwrap()).unwrap();
            all.iter().map(|p| (p.space.to_owned(), p.declaration.name().to_owned())).collect()
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
        assert!(parse(&text, &lex(&text).unwrap()).is_ok());
        assert_eq!(fails(&nested(NESTING_MAX + 1)).message, "braces are nested too deeply");
    }
}
