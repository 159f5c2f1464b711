//! Imports between the files of a crate, from `use` declarations, inline paths, and calls of methods that a type has in many
//! files. Names are followed through re-exports to the file that defines them. Crate roots, and `use` of a bare module, make no
//! edge.

use super::source::Sources;
use proc_macro2::{TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};
use syn::{Item, UseTree};

/// Longest chain of re-exports that is followed.
const MOST_HOPS: usize = 16;

/// Imports between the files of a crate.
pub struct Graph {
    /// Files that the edges name, by index: paths below `src/`.
    pub files: Vec<String>,
    /// Edges, from the file that imports to the file that defines.
    pub edges: BTreeSet<(usize, usize)>,
}

impl Graph {
    /// Returns the graph of a crate. `spread` is a type whose `impl` blocks lie in several files; calls of its methods are edges
    /// to the file of the method.
    pub fn new(sources: &Sources, spread: Option<&str>) -> Graph {
        let modules = Modules::new(sources);
        let mut edges = BTreeSet::new();
        for (at, file) in sources.files.iter().enumerate() {
            let mut paths = Paths { scope: file.module.clone(), found: Vec::new() };
            paths.visit_file(&file.syntax);
            for Path { scope, segments, is_glob } in paths.found {
                let Some(path) = modules.absolute(&scope, &segments) else { continue };
                let to = if is_glob { modules.file_of(&path) } else { modules.definition(&path, MOST_HOPS) };
                edges.extend(to.map(|to| (at, to)));
            }
        }
        if let Some(spread) = spread {
            edges.extend(edges_of_methods(sources, spread));
        }
        let is_root = |at: usize| sources.files[at].module.is_empty();
        edges.retain(|&(from, to)| from != to && !is_root(from) && !is_root(to));
        Graph { files: sources.files.iter().map(|file| file.path.clone()).collect(), edges }
    }

    /// Import cycles: strongly connected components of more than one file, the largest first.
    pub fn cycles(&self) -> Vec<Vec<&str>> {
        let mut next = vec![Vec::new(); self.files.len()];
        self.edges.iter().for_each(|&(from, to)| next[from].push(to));
        let mut search = Tarjan {
            next,
            count: 0,
            index: vec![None; self.files.len()],
            low: vec![0; self.files.len()],
            stack: Vec::new(),
            found: Vec::new(),
        };
        for at in 0..self.files.len() {
            if search.index[at].is_none() {
                search.visit(at);
            }
        }
        let names = |component: Vec<usize>| {
            let mut names: Vec<&str> = component.into_iter().map(|at| self.files[at].as_str()).collect();
            names.sort_unstable();
            names
        };
        let mut found: Vec<Vec<&str>> = search.found.into_iter().map(names).collect();
        found.retain(|component| component.len() > 1);
        found.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        found
    }

    /// Number of files in the largest cycle; 1 where no file is in one.
    pub fn largest_cycle(&self) -> usize {
        self.cycles().first().map_or(1, Vec::len)
    }

    /// The edges by name.
    pub fn imports(&self) -> impl Iterator<Item = (&str, &str)> {
        self.edges.iter().map(|&(from, to)| (self.files[from].as_str(), self.files[to].as_str()))
    }
}

/// Tarjan's search for strongly connected components.
struct Tarjan {
    next: Vec<Vec<usize>>,
    count: usize,
    index: Vec<Option<usize>>,
    low: Vec<usize>,
    stack: Vec<usize>,
    found: Vec<Vec<usize>>,
}

impl Tarjan {
    fn visit(&mut self, at: usize) {
        self.index[at] = Some(self.count);
        self.low[at] = self.count;
        self.count += 1;
        self.stack.push(at);
        for to in self.next[at].clone() {
            match self.index[to] {
                None => {
                    self.visit(to);
                    self.low[at] = self.low[at].min(self.low[to]);
                }
                Some(index) if self.stack.contains(&to) => self.low[at] = self.low[at].min(index),
                Some(_) => {}
            }
        }
        if self.index[at] == Some(self.low[at]) {
            let first = self.stack.iter().position(|other| *other == at).expect("on the stack");
            self.found.push(self.stack.split_off(first));
        }
    }
}

/// Definitions and imports of a module.
#[derive(Default)]
struct Module {
    file: usize,
    items: BTreeSet<String>,
    /// Names that `use` binds, with their paths as written.
    imports: BTreeMap<String, Vec<String>>,
    /// Modules of which everything is imported, as written.
    globs: Vec<Vec<String>>,
}

/// All modules of a crate, by path from its root.
struct Modules {
    by_path: BTreeMap<Vec<String>, Module>,
}

impl Modules {
    fn new(sources: &Sources) -> Modules {
        let mut modules = Modules { by_path: BTreeMap::new() };
        // The library's root comes before a program's, whose path is empty, too.
        for (at, file) in sources.files.iter().enumerate() {
            modules.add(at, &file.module, &file.syntax.items);
        }
        modules
    }

    fn add(&mut self, file: usize, path: &[String], items: &[Item]) {
        let module =
            self.by_path.entry(path.to_vec()).or_insert_with(|| Module { file, ..Module::default() });
        for item in items {
            if let Some(name) = defined(item) {
                module.items.insert(name);
            }
            if let Item::ForeignMod(foreign) = item {
                module.items.extend(foreign.items.iter().filter_map(|item| match item {
                    syn::ForeignItem::Fn(item) => Some(item.sig.ident.to_string()),
                    syn::ForeignItem::Static(item) => Some(item.ident.to_string()),
                    _ => None,
                }));
            }
            // A `use` inside a function counts for its module.
            let mut uses = Uses { found: Vec::new() };
            if !matches!(item, Item::Mod(_)) {
                uses.visit_item(item);
            }
            for Imported { path, name } in uses.found {
                match name {
                    Some(name) => {
                        module.imports.entry(name).or_insert(path);
                    }
                    None => module.globs.push(path),
                }
            }
        }
        for item in items {
            if let Item::Mod(child) = item
                && let Some((_, items)) = &child.content
            {
                self.add(file, &[path, &[child.ident.to_string()]].concat(), items);
            }
        }
    }

    /// Returns the absolute path for a path as written in a module; `None` if it leads out of the crate.
    fn absolute(&self, scope: &[String], path: &[String]) -> Option<Vec<String>> {
        self.absolute_within(scope, path, MOST_HOPS)
    }

    fn absolute_within(&self, scope: &[String], path: &[String], hops: usize) -> Option<Vec<String>> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([scope, rest].concat()),
            "super" => {
                let (mut scope, mut rest) = (scope.split_last()?.1, rest);
                while let Some((first, behind)) = rest.split_first()
                    && first == "super"
                {
                    (scope, rest) = (scope.split_last()?.1, behind);
                }
                Some([scope, rest].concat())
            }
            name => {
                let child = [scope, &[name.to_owned()]].concat();
                if self.by_path.contains_key(&child) {
                    return Some([&child, rest].concat());
                }
                let imported = self.by_path.get(scope)?.imports.get(name)?;
                // In `use wire::x as wire` the name refers to itself.
                let is_new = imported.first() != Some(first) && hops > 0;
                let imported = is_new.then(|| self.absolute_within(scope, imported, hops - 1))??;
                Some([&imported, rest].concat())
            }
        }
    }

    /// Returns the file of a module.
    fn file_of(&self, path: &[String]) -> Option<usize> {
        self.by_path.get(path).map(|module| module.file)
    }

    /// Returns the file that defines the item of an absolute path; `None` for a module itself.
    fn definition(&self, path: &[String], hops: usize) -> Option<usize> {
        let depth = (0..=path.len()).rev().find(|&depth| self.by_path.contains_key(&path[..depth]))?;
        let (scope, module) = (&path[..depth], &self.by_path[&path[..depth]]);
        let (name, _) = path[depth..].split_first()?;
        if module.items.contains(name) || hops == 0 {
            return Some(module.file);
        }
        if let Some(imported) = module.imports.get(name)
            && imported.first() != Some(name)
            && let Some(imported) = self.absolute(scope, imported)
        {
            return self.definition(&[&imported, &path[depth + 1..]].concat(), hops - 1);
        }
        let through_glob = module.globs.iter().find_map(|glob| {
            let target = self.absolute(scope, glob)?;
            self.by_path.get(&target).filter(|module| module.items.contains(name)).map(|module| module.file)
        });
        // Items that a macro defines are unknown; they belong to the file that calls the macro.
        through_glob.or(Some(module.file))
    }
}

/// Returns the name that an item defines in its module.
fn defined(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

/// A path imported by `use`: one name, or a glob.
struct Imported {
    path: Vec<String>,
    name: Option<String>,
}

/// Collects `use` declarations.
struct Uses {
    found: Vec<Imported>,
}

impl<'ast> Visit<'ast> for Uses {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        flatten(&item.tree, Vec::new(), &mut self.found);
    }
}

fn flatten(tree: &UseTree, mut path: Vec<String>, found: &mut Vec<Imported>) {
    match tree {
        UseTree::Path(tree) => {
            path.push(tree.ident.to_string());
            flatten(&tree.tree, path, found);
        }
        UseTree::Name(tree) if tree.ident == "self" => {
            found.push(Imported { name: path.last().cloned(), path });
        }
        UseTree::Name(tree) => {
            path.push(tree.ident.to_string());
            found.push(Imported { name: path.last().cloned(), path });
        }
        UseTree::Rename(tree) => {
            if tree.ident != "self" {
                path.push(tree.ident.to_string());
            }
            found.push(Imported { path, name: Some(tree.rename.to_string()) });
        }
        UseTree::Glob(_) => found.push(Imported { path, name: None }),
        UseTree::Group(tree) => tree.items.iter().for_each(|tree| flatten(tree, path.clone(), found)),
    }
}

/// A path as written in a module.
struct Path {
    scope: Vec<String>,
    segments: Vec<String>,
    is_glob: bool,
}

/// Collects all paths of two segments and more, those in macros as well.
struct Paths {
    scope: Vec<String>,
    found: Vec<Path>,
}

impl Paths {
    fn add(&mut self, segments: Vec<String>) {
        if segments.len() > 1 {
            self.found.push(Path { scope: self.scope.clone(), segments, is_glob: false });
        }
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if module.content.is_some() {
            self.scope.push(module.ident.to_string());
            visit::visit_item_mod(self, module);
            self.scope.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let mut found = Vec::new();
        flatten(&item.tree, Vec::new(), &mut found);
        for Imported { path, name } in found {
            self.found.push(Path { scope: self.scope.clone(), segments: path, is_glob: name.is_none() });
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.add(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_token_stream(&mut self, tokens: &'ast TokenStream) {
        paths_of_tokens(tokens.clone(), &mut |segments| self.add(segments));
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        paths_of_tokens(call.tokens.clone(), &mut |segments| self.add(segments));
    }
}

/// Finds paths in the tokens of a macro, which syn does not parse.
fn paths_of_tokens(tokens: TokenStream, add: &mut impl FnMut(Vec<String>)) {
    let mut path = Vec::new();
    let mut colons = 0;
    for token in tokens {
        match token {
            TokenTree::Ident(name) => {
                if colons < 2 {
                    add(std::mem::take(&mut path));
                }
                path.push(name.to_string());
                colons = 0;
            }
            TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
            TokenTree::Group(group) => {
                add(std::mem::take(&mut path));
                colons = 0;
                paths_of_tokens(group.stream(), add);
            }
            _ => {
                add(std::mem::take(&mut path));
                colons = 0;
            }
        }
    }
    add(path);
}

/// A call of a method.
struct MethodCall {
    method: String,
    /// Last identifier of the receiver; empty if it does not end in one.
    receiver: String,
    /// The type whose `impl` block the call lies in; empty outside of one.
    within: String,
}

/// All calls of methods in a file, those in macros as well.
fn method_calls(file: &syn::File) -> Vec<MethodCall> {
    let mut calls = Calls { within: String::new(), found: Vec::new() };
    calls.visit_file(file);
    calls.found
}

struct Calls {
    within: String,
    found: Vec<MethodCall>,
}

impl Calls {
    fn add(&mut self, method: &syn::Ident, receiver: String) {
        let within = self.within.clone();
        self.found.push(MethodCall { method: method.to_string(), receiver, within });
    }

    fn add_tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Group(group) => self.add_tokens(group.stream()),
                TokenTree::Punct(dot) if dot.as_char() == '.' => {
                    let before = at.checked_sub(1).map(|before| &tokens[before]);
                    let (method, arguments) = (tokens.get(at + 1), tokens.get(at + 2));
                    if let (Some(TokenTree::Ident(method)), Some(TokenTree::Group(_))) = (method, arguments) {
                        let receiver = match before {
                            Some(TokenTree::Ident(name)) => name.to_string(),
                            _ => String::new(),
                        };
                        self.add(method, receiver);
                    }
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Calls {
    fn visit_item_impl(&mut self, block: &'ast syn::ItemImpl) {
        let outer = std::mem::replace(&mut self.within, type_name(&block.self_ty));
        visit::visit_item_impl(self, block);
        self.within = outer;
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let receiver = match &*call.receiver {
            syn::Expr::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
            syn::Expr::Field(field) => match &field.member {
                syn::Member::Named(name) => Some(name.to_string()),
                syn::Member::Unnamed(_) => None,
            },
            _ => None,
        };
        self.add(&call.method, receiver.unwrap_or_default());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.add_tokens(call.tokens.clone());
    }
}

fn type_name(name: &syn::Type) -> String {
    match name {
        syn::Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
        _ => None,
    }
    .unwrap_or_default()
}

/// Collects methods of a type's own `impl` blocks, with their types.
struct Methods {
    found: Vec<(String, String)>,
}

impl<'ast> Visit<'ast> for Methods {
    fn visit_item_impl(&mut self, block: &'ast syn::ItemImpl) {
        for item in &block.items {
            if let syn::ImplItem::Fn(method) = item {
                self.found.push((type_name(&block.self_ty), method.sig.ident.to_string()));
            }
        }
    }
}

/// Returns edges from calls of a type's methods to the files of the methods. A call counts if only this type has a method of that
/// name, or if the receiver is named after the type, or is `self` in one of its `impl` blocks.
fn edges_of_methods(sources: &Sources, spread: &str) -> BTreeSet<(usize, usize)> {
    let (mut own, mut others) = (BTreeMap::new(), BTreeSet::new());
    for (at, file) in sources.files.iter().enumerate() {
        let mut methods = Methods { found: Vec::new() };
        methods.visit_file(&file.syntax);
        for (holder, method) in methods.found {
            if holder == spread {
                own.insert(method, at);
            } else {
                others.insert(method);
            }
        }
    }
    let mut edges = BTreeSet::new();
    for (from, file) in sources.files.iter().enumerate() {
        for call in method_calls(&file.syntax) {
            let is_named =
                call.receiver == spread.to_lowercase() || (call.receiver == "self" && call.within == spread);
            if let Some(&to) = own.get(&call.method)
                && (is_named || !others.contains(&call.method))
            {
                edges.insert((from, to));
            }
        }
    }
    edges
}
