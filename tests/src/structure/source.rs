//! Parsed source files of a crate, without code that is compiled for tests only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::visit_mut::{self, VisitMut};
use syn::{Attribute, Item, Meta};

/// A source file of the product.
pub struct SourceFile {
    /// Path below `src/`, with slashes.
    pub path: String,
    /// Path of the module that the file holds, from the crate's root; empty for the root.
    pub module: Vec<String>,
    /// The syntax tree without test items.
    pub syntax: syn::File,
    /// Lines of code, comments and blanks, without test items.
    pub lines: usize,
}

/// A crate's source files, ordered by path.
pub struct Sources {
    /// Folder of the crate.
    pub krate: String,
    /// Files that the product compiles.
    pub files: Vec<SourceFile>,
}

/// A function and its length.
pub struct Function {
    /// Path of its file below `src/`.
    pub file: String,
    /// Name without its type.
    pub name: String,
    /// Lines from `fn` to the closing brace.
    pub lines: usize,
}

impl Sources {
    /// Reads the crate in a folder of the workspace.
    ///
    /// # Panics
    /// When a file cannot be read or parsed, or no module declares it.
    pub fn read(krate: &str) -> Sources {
        let src = super::root().join(krate).join("src");
        let mut paths = Vec::new();
        list(&src, &mut paths);
        let texts = paths.into_iter().map(|path| {
            let text =
                fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            (path.strip_prefix(&src).expect("below src").to_string_lossy().into_owned(), text)
        });
        Sources::parse(krate, texts.collect())
    }

    /// Parses a crate from the texts of its files by path below `src/`. Its root is `lib.rs`, `main.rs` or both.
    ///
    /// # Panics
    /// As [`Sources::read`].
    pub fn parse(krate: &str, texts: BTreeMap<String, String>) -> Sources {
        let mut parser = Parser { krate, texts: &texts, files: BTreeMap::new(), tests: BTreeSet::new() };
        for root in ["lib.rs", "main.rs"].into_iter().filter(|root| texts.contains_key(*root)) {
            parser.parse(root, Vec::new());
        }
        for path in texts.keys() {
            let is_test = parser.tests.iter().any(|test| {
                let stem = test.trim_end_matches(".rs").trim_end_matches("/mod");
                path == test || path.starts_with(&format!("{stem}/"))
            });
            assert!(is_test || parser.files.contains_key(path), "{krate}/src/{path}: no module declares it");
        }
        Sources { krate: krate.to_owned(), files: parser.files.into_values().collect() }
    }

    /// Production lines: code, comments and blanks of all files, without test items.
    pub fn lines(&self) -> usize {
        self.files.iter().map(|file| file.lines).sum()
    }

    /// Functions with more than `limit` lines.
    pub fn functions_above(&self, limit: usize) -> Vec<Function> {
        let mut found = Vec::new();
        for file in &self.files {
            let mut functions = Functions { file: &file.path, found: Vec::new() };
            functions.visit_file(&file.syntax);
            found.extend(functions.found.into_iter().filter(|function| function.lines > limit));
        }
        found
    }

    /// Paths of files with fewer than `limit` production lines; `mod.rs` and crate roots are not counted.
    pub fn files_below(&self, limit: usize) -> Vec<&str> {
        let is_small = |file: &&SourceFile| {
            file.lines < limit && !file.module.is_empty() && !file.path.ends_with("mod.rs")
        };
        self.files.iter().filter(is_small).map(|file| file.path.as_str()).collect()
    }

    /// Names of all items and methods that are `pub` without restriction, with the file of each.
    pub fn public_items(&self) -> Vec<(&str, String)> {
        let mut found = Vec::new();
        for file in &self.files {
            let mut items = PublicItems { names: Vec::new() };
            items.visit_file(&file.syntax);
            found.extend(items.names.into_iter().map(|name| (file.path.as_str(), name)));
        }
        found
    }
}

struct Parser<'a> {
    krate: &'a str,
    texts: &'a BTreeMap<String, String>,
    files: BTreeMap<String, SourceFile>,
    /// Files of modules that are compiled for tests only.
    tests: BTreeSet<String>,
}

impl Parser<'_> {
    /// Parses the file of a module, and the files of the modules that it declares.
    fn parse(&mut self, path: &str, module: Vec<String>) {
        let text = self.texts.get(path).unwrap_or_else(|| panic!("{}/src/{path}: no such file", self.krate));
        let mut syntax =
            syn::parse_file(text).unwrap_or_else(|error| panic!("{}/src/{path}: {error}", self.krate));
        let mut tests = RemoveTests::default();
        tests.visit_file_mut(&mut syntax);
        // Modules of a root or `mod.rs` are in the same folder, those of other files in a folder of the same name.
        let (parent, name) = path.rsplit_once('/').map_or(("", path), |(parent, name)| (parent, name));
        let has_modules_beside = module.is_empty() || name == "mod.rs";
        let folder = if has_modules_beside { parent } else { path.trim_end_matches(".rs") };
        for (attributes, child) in &tests.modules {
            self.tests.insert(self.module_file(parent, folder, attributes, child));
        }
        for item in &syntax.items {
            if let Item::Mod(child) = item
                && child.content.is_none()
            {
                let name = child.ident.to_string();
                let file = self.module_file(parent, folder, &child.attrs, &name);
                self.parse(&file, [&module[..], &[name]].concat());
            }
        }
        let lines = text.lines().count() - tests.lines.len();
        self.files.insert(path.to_owned(), SourceFile { path: path.to_owned(), module, syntax, lines });
    }

    /// Returns the file of `mod name;` with these attributes.
    fn module_file(&self, parent: &str, folder: &str, attributes: &[Attribute], name: &str) -> String {
        let path = attributes.iter().find_map(|attribute| match &attribute.meta {
            Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
                syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => Some(path.value()),
                _ => None,
            },
            _ => None,
        });
        let below = |folder: &str, name: &str| match folder {
            "" => name.to_owned(),
            folder => format!("{folder}/{name}"),
        };
        let file = below(folder, &format!("{name}.rs"));
        match path {
            Some(path) => below(parent, &path),
            None if self.texts.contains_key(&file) => file,
            None => below(folder, &format!("{name}/mod.rs")),
        }
    }
}

/// Collects every Rust file below a folder.
pub fn list(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            list(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns whether an attribute is a `cfg` that needs `test`: `cfg(test)`, `cfg(all(test, ...))`.
fn is_for_tests(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else { return false };
    let text = list.tokens.to_string().replace(' ', "");
    list.path.is_ident("cfg")
        && (text == "test"
            || (text.starts_with("all(") && text.contains("test") && !text.contains("not(test")))
}

/// Removes code that is compiled for tests only, and counts its lines.
#[derive(Default)]
struct RemoveTests {
    lines: BTreeSet<usize>,
    modules: Vec<(Vec<Attribute>, String)>,
}

impl RemoveTests {
    /// Returns whether an item stays; records the lines of removed ones.
    fn keep(&mut self, attributes: &[Attribute], item: &impl Spanned) -> bool {
        let is_test = attributes.iter().any(is_for_tests);
        if is_test {
            let span = item.span();
            self.lines.extend(span.start().line..=span.end().line);
        }
        !is_test
    }
}

impl VisitMut for RemoveTests {
    fn visit_file_mut(&mut self, file: &mut syn::File) {
        self.retain(&mut file.items);
        visit_mut::visit_file_mut(self, file);
    }

    fn visit_item_mod_mut(&mut self, module: &mut syn::ItemMod) {
        if let Some((_, items)) = &mut module.content {
            self.retain(items);
        }
        visit_mut::visit_item_mod_mut(self, module);
    }

    fn visit_item_impl_mut(&mut self, block: &mut syn::ItemImpl) {
        block.items.retain(|item| match item {
            syn::ImplItem::Fn(item) => self.keep(&item.attrs, item),
            syn::ImplItem::Const(item) => self.keep(&item.attrs, item),
            syn::ImplItem::Type(item) => self.keep(&item.attrs, item),
            _ => true,
        });
        visit_mut::visit_item_impl_mut(self, block);
    }

    fn visit_block_mut(&mut self, block: &mut syn::Block) {
        block.stmts.retain(|statement| match statement {
            syn::Stmt::Local(local) => self.keep(&local.attrs, statement),
            syn::Stmt::Item(item) => self.keep(attributes(item), statement),
            syn::Stmt::Macro(call) => self.keep(&call.attrs, statement),
            syn::Stmt::Expr(syn::Expr::Block(block), _) => self.keep(&block.attrs, statement),
            syn::Stmt::Expr(syn::Expr::If(branch), _) => self.keep(&branch.attrs, statement),
            syn::Stmt::Expr(..) => true,
        });
        visit_mut::visit_block_mut(self, block);
    }
}

impl RemoveTests {
    fn retain(&mut self, items: &mut Vec<Item>) {
        items.retain(|item| {
            let stays = self.keep(attributes(item), item);
            if let Item::Mod(module) = item
                && !stays
                && module.content.is_none()
            {
                self.modules.push((module.attrs.clone(), module.ident.to_string()));
            }
            stays
        });
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

struct Functions<'a> {
    file: &'a str,
    found: Vec<Function>,
}

impl Functions<'_> {
    fn add(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let lines = block.span().end().line + 1 - signature.span().start().line;
        self.found.push(Function { file: self.file.to_owned(), name: signature.ident.to_string(), lines });
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.add(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

struct PublicItems {
    names: Vec<String>,
}

impl PublicItems {
    fn add(&mut self, visibility: &syn::Visibility, name: &syn::Ident) {
        if matches!(visibility, syn::Visibility::Public(_)) {
            self.names.push(name.to_string());
        }
    }
}

impl<'ast> Visit<'ast> for PublicItems {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Const(item) => self.add(&item.vis, &item.ident),
            Item::Enum(item) => self.add(&item.vis, &item.ident),
            Item::Fn(item) => self.add(&item.vis, &item.sig.ident),
            Item::Mod(item) => self.add(&item.vis, &item.ident),
            Item::Static(item) => self.add(&item.vis, &item.ident),
            Item::Struct(item) => self.add(&item.vis, &item.ident),
            Item::Trait(item) => self.add(&item.vis, &item.ident),
            Item::Type(item) => self.add(&item.vis, &item.ident),
            Item::Union(item) => self.add(&item.vis, &item.ident),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        match item {
            syn::ImplItem::Fn(item) => self.add(&item.vis, &item.sig.ident),
            syn::ImplItem::Const(item) => self.add(&item.vis, &item.ident),
            _ => {}
        }
    }
}
