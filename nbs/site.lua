-- What the site adds to the notebooks' Markdown: boxes, the name of a module, links without pictures.
-- Jupyter, Colab and GitHub show the same cells without it.

local BOXES = {
  ["Before you run."] = "predict",
  ["Remember."] = "remember",
  ["Paper"] = "paper",
}

local function opening(block)
  local first = block and block.content and block.content[1]
  return first and first.t == "Strong" and pandoc.utils.stringify(first) or ""
end

function BlockQuote(quote)
  local words = opening(quote.content[1])
  for start, class in pairs(BOXES) do
    if words:sub(1, #start) == start then
      return pandoc.Div(quote.content, pandoc.Attr("", { "box", class }))
    end
  end
end

function Para(para)
  if opening(para):match("^Exercise %d") then
    return pandoc.Div(para, pandoc.Attr("", { "box", "exercise" }))
  end
  if pandoc.utils.stringify(para):match("^You can go on to the next lesson here") then
    return pandoc.Div(para, pandoc.Attr("", { "second-pass" }))
  end
end

-- The badge is a picture of another host.
function Link(link)
  local badge = link.content[1]
  if link.target:match("colab%.research") and badge and badge.t == "Image" then
    return pandoc.Link("Open in Colab", link.target, "", pandoc.Attr("", { "colab" }))
  end
end

-- A page of the library is titled by its module as well as by its subject.
function Meta(meta)
  local file = quarto.doc.input_file:gsub("\\", "/")
  local module = file:match("/library/([%w_/]+)%.")
  if module and meta.title then
    local name = "cramnb." .. module:gsub("/", ".")
    meta.title = pandoc.Inlines({ pandoc.Code(name), pandoc.Space() }) .. meta.title
    return meta
  end
end

-- Levels of headings follow one another: a definition may come before the first section, and the
-- page of a model card has a title of its own.
function Pandoc(doc)
  local last = 1
  return doc:walk({ Header = function(header)
    if last > 1 and header.level == 1 then header.level = 2 end
    header.level = math.min(header.level, last + 1)
    last = header.level
    return header
  end })
end
